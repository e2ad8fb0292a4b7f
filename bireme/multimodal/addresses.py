"""Which IP addresses media may be fetched from: only those that anybody on the Internet can reach.

The list is IANA's registries of special-purpose addresses, spelled out because `ipaddress.is_global` differs between
Python versions and calls multicast global; an address must pass both. IPv6 forms that carry an IPv4 address are judged
by that address.
"""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REFUSED_V4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network; 0.0.0.0 reaches the host itself
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; 100.100.100.200 is a cloud's metadata service
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's host service, on an address that looks public
        "169.254.0.0/16",  # link-local; 169.254.169.254 and .170.2 are metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",  # 192.0.0.192 is a cloud's metadata service
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")  # all that is global; ULA, link-local, multicast lie outside
_REFUSED_V6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo (with an IPv4 inside), ORCHID, benchmarking
        "2001:db8::/32",
        "2002::/16",  # 6to4: an IPv4 inside
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not any(address in network for network in _REFUSED_V4)
    if address.scope_id is not None:
        return False
    inner = _inner_v4(address)
    if inner is not None:
        return is_public(inner)
    is_refused = any(address in network for network in _REFUSED_V6)
    return address in _UNICAST_V6 and address.is_global and not is_refused


def _inner_v4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None
