"""A media URL, parsed strictly: what two parsers could read differently is refused, not repaired.

Backslashes, user names, control characters, numeric hosts other than four plain decimals (2130706433, 0x7f.1,
0177.0.0.1, 127.1) and non-ASCII hosts (which normalize to digits and dots) have no use in a picture's address, and each
has misled some client's check. Errors do not repeat the URL.
"""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass

from bireme.config import MediaLimits
from bireme.errors import RequestError

_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # WHATWG: a host that ends in one is an IPv4 address
_SAFE = "/?:@!$&'()*+,;=-._~%[]"  # kept as they are: signed URLs break when rewritten


@dataclass(frozen=True, slots=True)
class HttpUrl:
    scheme: str
    host: str  # lower case ASCII: a name without trailing dot, or an IP address without brackets
    port: int
    target: str  # path and query, percent-encoded

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """Return the host where it is an IP address, None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


def scheme_of(text: str) -> str:
    """Return the scheme in lower case; "" when there is none."""
    match = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", text)
    return match.group().lower() if match else ""


def parse_http_url(text: str, limits: MediaLimits) -> HttpUrl:
    """Check form, scheme and domain. Raises RequestError. The address is checked on connecting."""
    if len(text) > limits.max_url_characters:
        raise RequestError(
            f"a URL of {len(text)} characters; at most {limits.max_url_characters} (media.max_url_characters),"
            " or send a data: URL"
        )
    if "\\" in text or any(character.isspace() or not character.isprintable() for character in text):
        raise RequestError("the URL has spaces, backslashes or control characters; percent-encode them")
    match = re.fullmatch(r"(https?)://([^/?#]*)([^#]*)(#.*)?", text, re.IGNORECASE)
    if not match:
        raise RequestError("not a URL of the form https://host/path")
    scheme = match.group(1).lower()
    if scheme == "http" and not limits.allow_http:
        raise RequestError("http is not allowed here (media.allow_http); use https")
    host, port = _split_authority(match.group(2))
    url = HttpUrl(scheme, host, port or _PORTS[scheme], _target(match.group(3)))
    _check_domain(url.host, limits.allowed_domains)
    return url


def parse_redirect(base: HttpUrl, location: str, limits: MediaLimits) -> HttpUrl:
    """Return where a redirect leads. Raises RequestError; https does not lead to http."""
    try:
        text = urllib.parse.urljoin(str(base), location)
    except ValueError:
        raise RequestError("the server redirects to something that is not a URL") from None
    url = parse_http_url(text, limits)
    if base.scheme == "https" and url.scheme == "http":
        raise RequestError("the server redirects from https to http; give a URL that stays on https")
    return url


def _split_authority(authority: str) -> tuple[str, int]:
    if "@" in authority:
        raise RequestError("the URL has a user name; media are fetched without credentials, remove it")
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::(\d{0,5}))?", authority)
    plain = re.fullmatch(r"([^:\[\]]+)(?::(\d{0,5}))?", authority)
    match = bracketed or plain
    if not match:
        raise RequestError("the URL's host is malformed")
    port = int(match.group(2) or 0)
    if port > 65535 or (port == 0 and match.group(2)):
        raise RequestError(f"the URL's port is {port}; 1 to 65535")
    return (_ipv6 if bracketed else _name)(match.group(1)), port


def _ipv6(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise RequestError("the URL's host is not an IPv6 address") from None


def _name(text: str) -> str:
    host = text.lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise RequestError("the URL's host is not a plain host name; write international names as xn--...")
    if _NUMBER.fullmatch(labels[-1]):
        return _ipv4(text)
    return host


def _ipv4(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise RequestError("the URL's host is a number; write an IPv4 address as four decimal numbers") from None


def _target(text: str) -> str:
    encoded = urllib.parse.quote(text, safe=_SAFE)
    return encoded if encoded.startswith("/") else "/" + encoded


def _check_domain(host: str, allowed: tuple[str, ...]) -> None:
    """`example.com` allows that host, `.example.com` every host below it."""
    for domain in (domain.lower() for domain in allowed):
        if host == domain or (domain.startswith(".") and host.endswith(domain)):
            return
    if allowed:
        raise RequestError("the URL's host is not in media.allowed_domains of this deployment")
