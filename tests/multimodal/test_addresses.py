import ipaddress

import pytest

from bireme.multimodal.addresses import is_public

REFUSED = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16
169.254.0.1 169.254.169.254 169.254.170.2 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.9 192.0.0.192 192.0.2.1
192.31.196.1 192.52.193.1 192.88.99.1 192.168.1.1 192.175.48.1 198.18.0.1 198.19.255.255 198.51.100.1
203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
:: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:0:8.8.8.8
64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b:1::8.8.8.8 100::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
2001:2::1 2001:20::1 2001:db8::1 2002:7f00:1::1 2002:808:808::1 2620:4f:8000::1 3fff::1 5f00::1 fc00::1
fd00:ec2::254 fe80::1 fe80::1%eth0 2606:4700::1%eth0 fec0::1 ff02::1 ff0e::1
""".split()
ALLOWED = "1.1.1.1 8.8.8.8 93.184.216.34 172.15.0.1 172.32.0.1 100.128.0.1 2606:4700::1111 2a00:1450::1".split()


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_for_everybody_is_refused(text):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", [*ALLOWED, "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_what_anybody_can_reach_is_allowed(text):
    assert is_public(ipaddress.ip_address(text))
