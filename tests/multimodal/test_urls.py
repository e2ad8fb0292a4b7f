import pytest

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.multimodal.urls import parse_http_url, parse_redirect, scheme_of

LIMITS = MediaLimits()


def parse(text, **limits):
    return parse_http_url(text, MediaLimits(**limits))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("https://example.com/a.png", "https://example.com/a.png"),
        ("HTTPS://Example.COM./a.png", "https://example.com/a.png"),
        ("http://example.com", "http://example.com/"),
        ("http://example.com:80/", "http://example.com/"),
        ("https://example.com:8443/a?b=c&d=%2F%2B#part", "https://example.com:8443/a?b=c&d=%2F%2B"),
        ("https://example.com/bücher.png", "https://example.com/b%C3%BCcher.png"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example/"),
        ("http://93.184.216.34/a", "http://93.184.216.34/a"),
        ("http://[2606:4700::1111]:8080/a", "http://[2606:4700::1111]:8080/a"),
        ("http://example.com?q", "http://example.com/?q"),
    ],
)
def test_a_plain_url_is_read_as_it_stands(text, read):
    assert str(parse(text)) == read


def test_a_url_may_be_as_long_as_the_recipe_says():
    limits = MediaLimits(max_url_characters=30)
    assert str(parse_http_url("https://example.com/" + "a" * 10, limits))
    with pytest.raises(RequestError, match=r"31 characters; at most 30 \(media.max_url_characters\)"):
        parse_http_url("https://example.com/" + "a" * 11, limits)


@pytest.mark.parametrize(
    "host",
    "2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 127.1 127.0.1 127.0.0.1. 127.0.0.0x1 256.1.1.1 0x".split(),
)
def test_an_address_that_is_not_four_plain_decimals_is_refused(host):
    with pytest.raises(RequestError, match="four decimal numbers"):
        parse(f"http://{host}/a.png")


@pytest.mark.parametrize(
    "text",
    [
        "http://example.com@127.0.0.1/",
        "http://user:secret@example.com/",
        "http://127.0.0.1\\@example.com/",
        "http:\\\\127.0.0.1/",
        "http://example.com\\.evil.example/",
        "http://example.com/\r\nHost: other",
        "http://example.com/a b",
        "http://exa\tmple.com/",
        "http://example.com/\x00",
        "http://example.com/\ud800",
        "http://①②⑦.⓪.⓪.①/",
        "http://127。0。0。1/",
        "http://bücher.example/",
        "http://%31%32%37.0.0.1/",
        "http:///a.png",
        "http:example.com",
        "http://",
        "http://..",
        "http://a..b/",
        "http://-a.example/",
        "http://" + "a" * 64 + ".example/",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:80:80/",
        "http://example.com:8x/",
        "http://[::1/",
        "http://[::1]x/",
        "http://[fe80::1%25eth0]/",
        "http://[not:an:address]/",
        "ftp://example.com/",
        "http://example.com/" + "a" * 8192,
    ],
)
def test_what_two_parsers_could_read_differently_is_refused(text):
    with pytest.raises(RequestError) as refused:
        parse(text)
    assert "example" not in str(refused.value) and "127" not in str(refused.value)


@pytest.mark.parametrize("host", ["example.com@127.0.0.1", "user:secret@example.com", "@example.com"])
def test_a_user_name_is_refused_as_such(host):
    with pytest.raises(RequestError, match="without credentials"):
        parse(f"http://{host}/")


def test_http_can_be_switched_off():
    with pytest.raises(RequestError, match="allow_http"):
        parse("http://example.com/", allow_http=False)


@pytest.mark.parametrize("host", ["example.com", "EXAMPLE.com.", "a.b.example.org"])
def test_an_allowed_domain_is_read(host):
    assert parse(f"https://{host}/", allowed_domains=("example.com", ".example.org"))


@pytest.mark.parametrize("host", ["example.net", "sub.example.com", "notexample.org", "example.org", "93.184.216.34"])
def test_every_other_domain_is_refused(host):
    with pytest.raises(RequestError, match="allowed_domains"):
        parse(f"https://{host}/", allowed_domains=("example.com", ".example.org"))


def test_a_redirect_may_be_relative():
    assert str(parse_redirect(parse("https://example.com/a/b"), "../c?d", LIMITS)) == "https://example.com/c?d"


@pytest.mark.parametrize(
    "location",
    ["http://example.com/", "//user@example.com/", "file:///etc/passwd", "http://[", "/\\example.com", "gopher://a/"],
)
def test_a_redirect_goes_through_the_same_gate(location):
    with pytest.raises(RequestError):
        parse_redirect(parse("https://example.com/"), location, LIMITS)


@pytest.mark.parametrize(
    ("text", "scheme"), [("HTTP://a", "http"), ("data:x", "data"), ("/etc/passwd", ""), ("", ""), ("1:a", "")]
)
def test_the_scheme_is_what_stands_before_the_colon(text, scheme):
    assert scheme_of(text) == scheme
