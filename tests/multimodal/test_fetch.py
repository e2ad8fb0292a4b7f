"""Each test has its server on 127.0.0.1, the one address that the injected check calls public."""

import asyncio
import ipaddress
import ssl
import subprocess

import pytest

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.multimodal.budget import Budget
from bireme.multimodal.fetch import HttpFetcher

HERE = ipaddress.ip_address("127.0.0.1")


class Names:
    """A resolver with scripted answers; the last one of a name stays."""

    def __init__(self, **answers):
        self.answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append(host)
        given = self.answers.get(host)
        if not given:
            raise OSError("no such name")
        return given.pop(0) if len(given) > 1 else given[0]


@pytest.fixture
async def fetch():
    """Return a function: URL, limits -> body; every fetcher is closed."""
    made = []

    async def run(url, names=None, tls=None, is_allowed=lambda address: address == HERE, **limits):
        settings = MediaLimits(**{"timeout_s": 5.0, **limits})
        made.append(HttpFetcher(settings, names or Names(pictures_example=[["127.0.0.1"]]), is_allowed, tls))
        return await made[-1].fetch(url, Budget(settings).picture())

    yield run
    for fetcher in made:
        await fetcher.close()


async def test_a_picture_is_fetched(media_server, fetch):
    media_server.reply("/a.png", b"picture")
    assert await fetch(media_server.url("/a.png")) == b"picture"


async def test_the_host_name_stays_in_the_host_header_and_nothing_else_is_told(media_server, fetch):
    media_server.reply("/a.png?k=%2F", b"picture")
    await fetch(media_server.url("/a.png?k=%2F", "pictures.example"))
    head = media_server.requests[0].lower()
    assert f"host: pictures.example:{media_server.port}\r\n" in head
    assert not any(name in head for name in ("authorization", "cookie", "referer"))


async def test_the_addresses_of_the_world_are_checked_by_default(media_server):
    settings = MediaLimits(timeout_s=5.0)
    fetcher = HttpFetcher(settings)
    for host in ("127.0.0.1", "localhost", "localhost.", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
        with pytest.raises(RequestError, match="public address"):
            await fetcher.fetch(media_server.url("/", host), Budget(settings).picture())
    await fetcher.close()
    assert media_server.requests == []


@pytest.mark.parametrize("address", ["127.0.0.2", "10.0.0.1", "169.254.169.254", "fd00:ec2::254", "::ffff:10.0.0.1"])
async def test_a_name_of_a_private_address_is_refused_before_a_socket_is_made(fetch, monkeypatch, address):
    monkeypatch.setattr(HttpFetcher, "_make_socket", lambda *_: pytest.fail("a socket was made"))
    with pytest.raises(RequestError, match="public address") as refused:
        await fetch("http://pictures.example:23700/", Names(pictures_example=[[address]]))
    assert address not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.2", "10.0.0.1", "169.254.169.254", "[fd00:ec2::254]", "[::ffff:10.0.0.1]"])
async def test_a_private_address_in_the_url_is_refused_before_a_socket_is_made(fetch, monkeypatch, host):
    monkeypatch.setattr(HttpFetcher, "_make_socket", lambda *_: pytest.fail("a socket was made"))
    with pytest.raises(RequestError, match="public address"):
        await fetch(f"http://{host}:23700/")


async def test_a_name_with_one_private_address_among_others_is_refused(media_server, fetch):
    with pytest.raises(RequestError, match="public address"):
        await fetch(media_server.url("/", "pictures.example"), Names(pictures_example=[["127.0.0.1", "10.0.0.1"]]))
    assert media_server.requests == []


async def test_an_unknown_name_gets_the_answer_of_a_private_one(fetch):
    errors = []
    for names in (Names(), Names(pictures_example=[["10.0.0.1"]])):
        with pytest.raises(RequestError) as refused:
            await fetch("http://pictures.example/", names)
        errors.append(str(refused.value))
    assert errors[0] == errors[1]


async def test_a_name_that_changes_after_the_check_gains_nothing(media_server, fetch):
    """Whoever looks the name up again, for the check or to connect, gets 127.0.0.2."""
    media_server.reply("/a.png", b"picture")
    names = Names(pictures_example=[["127.0.0.1"], ["127.0.0.2"]])
    assert await fetch(media_server.url("/a.png", "pictures.example"), names) == b"picture"
    assert names.asked == ["pictures.example"]


async def test_each_redirect_hop_is_looked_up_and_checked_anew(media_server, fetch):
    media_server.redirect("/a.png", "/b.png")
    names = Names(pictures_example=[["127.0.0.1"], ["127.0.0.2"]])
    with pytest.raises(RequestError, match="public address"):
        await fetch(media_server.url("/a.png", "pictures.example"), names)
    assert len(media_server.requests) == 1


async def test_the_address_of_the_socket_is_checked_whatever_the_resolver_said(media_server, fetch):
    """The first check passes, the one at connect time does not."""
    answers = iter([True, False])
    with pytest.raises(RequestError, match="public address"):
        await fetch(media_server.url("/", "pictures.example"), is_allowed=lambda address: next(answers))
    assert media_server.requests == []


@pytest.mark.parametrize(
    "target", ["http://127.0.0.2:{}/", "http://inside.example:{}/", "http://[::1]:{}/", "//127.0.0.2:{}/"]
)
async def test_a_redirect_to_a_private_place_is_refused(media_server, fetch, target):
    media_server.redirect("/a.png", target.format(media_server.port))
    names = Names(inside_example=[["127.0.0.2"]])
    with pytest.raises(RequestError, match="public address"):
        await fetch(media_server.url("/a.png"), names)


@pytest.mark.parametrize(
    "target",
    ["file:///etc/passwd", "ftp://pictures.example/", "http://user@pictures.example/", "data:image/png;base64,AA=="],
)
async def test_a_redirect_out_of_http_is_refused(media_server, fetch, target):
    media_server.redirect("/a.png", target)
    with pytest.raises(RequestError):
        await fetch(media_server.url("/a.png"))


async def test_redirects_are_followed_up_to_the_limit(media_server, fetch):
    for step in range(3):
        media_server.redirect(f"/{step}", f"/{step + 1}", "307 Temporary Redirect")
    media_server.reply("/3", b"picture")
    assert await fetch(media_server.url("/0"), max_redirects=3) == b"picture"
    with pytest.raises(RequestError, match="more than 2 redirects"):
        await fetch(media_server.url("/0"), max_redirects=2)


async def test_a_redirect_leaves_the_allowed_domains_no_more_than_the_url_does(media_server, fetch):
    media_server.redirect("/a.png", media_server.url("/b.png"))
    with pytest.raises(RequestError, match="allowed_domains"):
        await fetch(media_server.url("/a.png", "pictures.example"), allowed_domains=("pictures.example",))


async def test_proxies_of_the_environment_are_not_used(media_server, fetch, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:23799")
    media_server.reply("/a.png", b"picture")
    assert await fetch(media_server.url("/a.png", "pictures.example")) == b"picture"


async def test_a_body_that_says_it_is_too_large_is_not_read(media_server, fetch):
    media_server.reply("/a.png", Content_Length="101")
    with pytest.raises(RequestError, match="101 bytes; at most 100"):
        await fetch(media_server.url("/a.png"), max_image_bytes=100)


async def test_a_body_is_cut_at_the_limit_when_its_size_is_not_said(media_server, fetch):
    async def endless(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(b"x" * 4096)
            await writer.drain()

    media_server.answers["/a.png"] = endless
    with pytest.raises(RequestError, match="at most 100000"):
        await fetch(media_server.url("/a.png"), max_image_bytes=100_000)


async def test_exactly_the_limit_is_allowed(media_server, fetch):
    media_server.reply("/a.png", b"x" * 100)
    assert len(await fetch(media_server.url("/a.png"), max_image_bytes=100)) == 100


async def test_a_body_that_drips_ends_at_the_time_limit(media_server, fetch):
    async def drip(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    media_server.answers["/a.png"] = drip
    with pytest.raises(RequestError, match="within 0.3 s"):
        await fetch(media_server.url("/a.png"), timeout_s=0.3)


async def test_the_time_limit_holds_over_all_redirects(media_server, fetch):
    async def slow(_, writer):
        await asyncio.sleep(0.15)
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: /a.png\r\nContent-Length: 0\r\n\r\n")

    media_server.answers["/a.png"] = slow
    with pytest.raises(RequestError, match="within 0.4 s"):
        await fetch(media_server.url("/a.png"), timeout_s=0.4, max_redirects=1000)


async def test_a_look_up_that_hangs_ends_at_the_time_limit(fetch):
    async def hang(host, port):
        await asyncio.sleep(60)

    with pytest.raises(RequestError, match="within 0.2 s"):
        await fetch("http://pictures.example/", hang, timeout_s=0.2)


async def test_a_body_that_ends_early_is_an_error(media_server, fetch):
    media_server.reply("/a.png", b"half", Content_Length="8")
    with pytest.raises(RequestError, match="broke off"):
        await fetch(media_server.url("/a.png"))


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "206 Partial Content", "304 Not Modified"])
async def test_an_answer_other_than_200_is_named(media_server, fetch, status):
    media_server.reply("/a.png", b"", status)
    with pytest.raises(RequestError, match=f"answers {status[:3]}"):
        await fetch(media_server.url("/a.png"))


async def test_a_redirect_to_nowhere_is_an_error(media_server, fetch):
    media_server.reply("/a.png", b"", "302 Found")
    with pytest.raises(RequestError, match="without saying where"):
        await fetch(media_server.url("/a.png"))


async def test_a_compressed_body_is_refused_unread(media_server, fetch):
    media_server.reply("/a.png", b"\x1f\x8b", Content_Encoding="gzip")
    with pytest.raises(RequestError, match="compressed body"):
        await fetch(media_server.url("/a.png"))


async def test_a_server_that_does_not_speak_http_is_an_error_without_its_words(media_server, fetch):
    async def banner(_, writer):
        writer.write(b"SSH-2.0-secret\r\n\r\n")

    media_server.answers["/a.png"] = banner
    with pytest.raises(RequestError) as refused:
        await fetch(media_server.url("/a.png"))
    assert "SSH" not in str(refused.value) and "127.0.0.1" not in str(refused.value)


async def test_a_closed_port_is_an_error_without_the_address(fetch):
    with pytest.raises(RequestError, match="can't be reached") as refused:
        await fetch("http://pictures.example:23701/a.png")
    assert "127.0.0.1" not in str(refused.value)


async def test_fetches_beyond_the_limit_wait(media_server):
    running, most = 0, 0

    async def count(_, writer):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.02)
        running -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    media_server.answers["/a.png"] = count
    settings = MediaLimits(max_concurrent_fetches=2, timeout_s=5.0)
    fetcher = HttpFetcher(settings, Names(), lambda address: address == HERE)
    budget = Budget(settings)
    await asyncio.gather(*(fetcher.fetch(media_server.url("/a.png"), budget.picture()) for _ in range(6)))
    await fetcher.close()
    assert most == 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=pictures.example".split()
    command += [
        "-addext",
        "subjectAltName=DNS:pictures.example",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(folder / "cert"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl can't make a certificate here")
    return folder


@pytest.fixture
async def tls_server(certificate):
    seen = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert", certificate / "key")
    context.sni_callback = lambda connection, name, _: seen.append(name)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\npicture")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield listener.sockets[0].getsockname()[1], seen
    listener.close()


async def test_tls_is_verified_for_the_name_though_the_address_is_pinned(tls_server, certificate, fetch):
    port, seen = tls_server
    trust = ssl.create_default_context(cafile=str(certificate / "cert"))
    names = Names(pictures_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]])
    assert await fetch(f"https://pictures.example:{port}/", names, trust) == b"picture"
    assert seen == ["pictures.example"]
    with pytest.raises(RequestError, match="certificate"):
        await fetch(f"https://other.example:{port}/", names, trust)
    with pytest.raises(RequestError, match="certificate"):
        await fetch(f"https://pictures.example:{port}/", names)
