"""Fetches pictures by https and http, from public addresses alone.

A name is looked up once for each connection, every answer is checked, and the connection goes to exactly the checked
addresses: no second look-up could answer differently. The host name stays in the Host header and in TLS. The socket's
own address is checked once more when it is made, which also covers hosts that are addresses. Redirects are followed
here, each as a URL of its own.

aiohttp does the HTTP: its resolver and socket factory are public hooks at the two places that matter, and it ignores
environment variables (trust_env is off).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.multimodal.addresses import Address, is_public
from bireme.multimodal.budget import PictureBudget
from bireme.multimodal.urls import HttpUrl, parse_http_url, parse_redirect

logger = logging.getLogger("bireme.multimodal")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> IP addresses; raises OSError
IsAllowed = Callable[[Address], bool]

_CHUNK_BYTES = 64 << 10
_MAX_LOOKUPS = 8  # threads: a name server that never answers holds one until the system's timeout
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"User-Agent": "bireme", "Accept": "image/*", "Accept-Encoding": "identity"}
_NOT_PUBLIC = "its host does not resolve to a public address; send the picture as a data: URL"


class _NotPublic(OSError):
    """An address was refused when its socket was about to be made; never carries the address."""


class HttpFetcher:
    """Belongs to the event loop in which it is made; `close` ends what is in flight.

    Tests give `resolve` and `is_allowed`: the only seam through which a server on this host can be reached.
    """

    def __init__(
        self,
        limits: MediaLimits,
        resolve: Resolve | None = None,
        is_allowed: IsAllowed = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._is_allowed = is_allowed
        self._lookups = ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="media-lookup")
        self._slots = asyncio.Semaphore(limits.max_concurrent_fetches)
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(resolve or self._look_up, is_allowed),
            use_dns_cache=False,
            force_close=True,
            limit=0,  # `_slots` bounds them
            socket_factory=self._make_socket,
            ssl=tls if tls is not None else True,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),  # one limit over all redirects, in `fetch`
        )

    async def close(self) -> None:
        await self._session.close()
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, text: str, budget: PictureBudget) -> bytes:
        """Return the body. Raises RequestError: refused, too large, too slow, or not there."""
        url = parse_http_url(text, self._limits)
        async with self._slots:
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    return await self._follow(url, budget)
            except TimeoutError:
                limit = self._limits.timeout_s
                raise RequestError(f"its server did not deliver within {limit:g} s (media.timeout_s)") from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _fetch_error(error) from None

    async def _follow(self, url: HttpUrl, budget: PictureBudget) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            self._check_address(url)
            async with self._session.get(_client_url(url), allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await _read(response, budget)
                location = response.headers.get("Location", "")
            if not location:
                raise RequestError("its server redirects without saying where")
            url = parse_redirect(url, location, self._limits)
        raise RequestError(f"more than {self._limits.max_redirects} redirects (media.max_redirects); give the last URL")

    def _check_address(self, url: HttpUrl) -> None:
        """A host that is an address is refused before anything is opened; names wait for the resolver."""
        address = url.address
        if address is not None and not self._is_allowed(address):
            logger.warning("media_refused reason=address_not_public")
            raise RequestError(_NOT_PUBLIC)

    def _make_socket(self, info: Any) -> socket.socket:
        """aiohttp's socket factory: called with each address that it is about to connect to."""
        family, kind, protocol, _, target = info
        if not _is_allowed_text(str(target[0]), self._is_allowed):
            raise _NotPublic
        return socket.socket(family, kind, protocol)

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._lookups, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(info[4][0]) for info in found]


class _CheckedResolver(AbstractResolver):
    """Gives public addresses or nothing."""

    def __init__(self, resolve: Resolve, is_allowed: IsAllowed) -> None:
        self._resolve = resolve
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError. A name with one address that is not public is refused as a whole: it is an attack."""
        addresses = list(dict.fromkeys(await self._resolve(host, port)))
        if not addresses or not all(_is_allowed_text(text, self._is_allowed) for text in addresses):
            logger.warning("media_refused reason=name_not_public")
            raise _NotPublic
        return [_host_entry(host, port, text) for text in addresses]

    async def close(self) -> None:
        return None


def _host_entry(host: str, port: int, address: str) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return {
        "hostname": host,
        "host": address,
        "port": port,
        "family": family,
        "proto": socket.IPPROTO_TCP,
        "flags": socket.AI_NUMERICHOST,
    }


def _is_allowed_text(text: str, is_allowed: IsAllowed) -> bool:
    try:
        return is_allowed(ipaddress.ip_address(text))
    except ValueError:
        return False


def _client_url(url: HttpUrl) -> Any:
    """Return aiohttp's form of a URL, unchanged. Raises RequestError when it reads another host in it."""
    from yarl import URL

    theirs = URL(str(url), encoded=True)
    if (theirs.scheme, theirs.host, theirs.port) != (url.scheme, url.host, url.port):
        raise RequestError("the URL's host is not a plain host name")
    return theirs


async def _read(response: aiohttp.ClientResponse, budget: PictureBudget) -> bytes:
    if response.status != 200:
        raise RequestError(f"its server answers {response.status}; check the URL")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError("its server sends a compressed body; pictures are compressed already")
    budget.check(response.content_length or 0)
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        budget.take(len(chunk))
        body += chunk
    return bytes(body)


def _fetch_error(error: BaseException) -> RequestError:
    """Return a failure in our words: the library's texts hold addresses and the URL."""
    logger.info("media_fetch_failed kind=%s", type(error).__name__)
    if isinstance(error, aiohttp.ClientSSLError):
        return RequestError("its server's certificate or TLS is not valid")
    if isinstance(error, aiohttp.ClientConnectorDNSError | _NotPublic) or _was_refused(error):
        return RequestError(_NOT_PUBLIC)
    if isinstance(error, aiohttp.ClientConnectorError):
        return RequestError("its server can't be reached")
    return RequestError("its server broke off, or does not speak HTTP")


def _was_refused(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _NotPublic):
            return True
        error = error.__cause__
    return False
