"""Without keys a web page that a user of this machine visits may not use the server through the user's browser.

Two ways are known. The page's own site may let its name point to this machine (DNS rebinding): the browser then takes
the server for that site, but sends the site's name as Host. And a page of any site may send what needs no permission,
as a form does; the browser tells where it comes from. An address as Host is no page's name, so where the port is open
to a network every address is taken. With keys none of this matters: no browser adds a key by itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from bireme.openai.http.call import Call
from bireme.openai.http.error_replies import HttpError

_MAX_KNOWN = 256
_PORT = re.compile(r":\d*$")
_FOREIGN = "requests of another site's pages are refused"
_REMEDY = "name the host in frontend.allowed_hosts, or ask for keys (frontend.api_keys)"
_OWN_SITES = (b"", b"same-origin", b"none")


class BrowserGuard:
    def __init__(self, bound_to: str, allowed_hosts: Iterable[str]) -> None:
        """`bound_to`: what the port listens on. `allowed_hosts`: names; `.example.com`: and all below."""
        self._bound_to, self._allowed = bound_to.lower(), tuple(host.lower() for host in allowed_hosts)
        self._is_local = _is_loopback(self._bound_to)
        self._known = {b""}  # Hosts that were right; without one it is no browser

    def check(self, call: Call) -> None:
        host = call.header(b"host")
        if host not in self._known:
            self._check_host(host)
        site, origin = call.header(b"sec-fetch-site"), call.header(b"origin")
        if site not in _OWN_SITES and not _is_navigation(call):
            raise _refusal("sec-fetch-site", site, f"{_FOREIGN}; open this server's own page")
        if origin and origin.partition(b"://")[2].lower() != host.lower() and not self._is_allowed(_name_of(origin)):
            raise _refusal("origin", origin, f"{_FOREIGN}: {_REMEDY}")

    def _check_host(self, host: bytes) -> None:
        name = _name_of(host)
        is_own = _is_loopback(name) or name == self._bound_to or self._is_allowed(name)
        if not (is_own or (_is_address(name) and not self._is_local)):
            raise _refusal("host", host, f"it is none of this server's names: {_REMEDY}")
        if len(self._known) < _MAX_KNOWN:
            self._known.add(host)

    def _is_allowed(self, name: str) -> bool:
        return any(name == host or (host[:1] == "." and name.endswith(host)) for host in self._allowed)


def _name_of(address: bytes) -> str:
    """Return the name in `name:port`, `[address]:port` or an origin."""
    return _PORT.sub("", address.decode("latin-1").rpartition("://")[2]).strip("[]").rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    if _is_address(name):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_navigation(call: Call) -> bool:
    """Whether a user follows a link: the page that it was on does not see the answer."""
    return call.method in ("GET", "HEAD") and call.header(b"sec-fetch-mode") == b"navigate"


def _refusal(name: str, value: bytes, reason: str) -> HttpError:
    shown = value[:80].decode("latin-1")
    return HttpError(403, f"{name}: {shown}; {reason}", code=f"foreign_{name.replace('-', '_')}")
