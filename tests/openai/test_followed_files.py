"""Files that are read again while a frontend serves: keys, and a certificate on a real port."""

import hashlib
import os
import ssl
from pathlib import Path

import pytest

from bireme.errors import ConfigError
from bireme.launch.doors import connect
from bireme.openai.__main__ import WRONG, main
from bireme.openai.followed_files import FollowedFiles
from bireme.openai.http.error_replies import HttpError, RateLimitError
from bireme.openai.http.tls import TlsFiles
from bireme.openai.keys import load_keys, read_keys
from tests.openai.certificates import write_pair
from tests.openai.frontend_process import frontend_server, wait_for


def write_keys(path, **limits_of):
    """Replace the file by one with a key for each name, which is its own secret."""
    rows = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **limits}
        for name, limits in limits_of.items()
    ]
    new = path.with_suffix(".new")
    new.write_text(f"keys: {rows}")
    new.replace(path)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.yaml"
    write_keys(path, alice={"requests_per_minute": 2}, bob={})
    return path


@pytest.fixture
def followed(keys):
    """The keys, and what follows their file."""
    loaded = load_keys(keys)
    return loaded, FollowedFiles("api_keys", [keys], lambda: read_keys(keys), loaded.replace)


def tenant(loaded, name):
    return loaded.tenant([f"Bearer {name}".encode()])


async def test_a_new_key_is_taken_and_one_that_is_gone_is_refused(keys, followed):
    loaded, files = followed
    write_keys(keys, alice={}, carol={})
    await files.turn()
    assert tenant(loaded, "carol").name == "carol"
    with pytest.raises(HttpError, match="not known"):
        tenant(loaded, "bob")


async def test_a_key_that_stays_keeps_what_it_has_used_of_its_limits(keys, followed):
    loaded, files = followed
    alice = tenant(loaded, "alice")
    alice.begin()
    alice.begin()
    write_keys(keys, alice={"requests_per_minute": 2}, carol={})
    await files.turn()
    with pytest.raises(RateLimitError):
        tenant(loaded, "alice").begin()
    write_keys(keys, alice={"max_concurrent_requests": 2})
    await files.turn()
    with pytest.raises(RateLimitError, match="2 requests of this key are under way"):
        tenant(loaded, "alice").begin()
    alice.end()
    tenant(loaded, "alice").begin()


@pytest.mark.parametrize(
    "content", ["", "keys: []", "keys: [{name: alice}]", "{", "keys: [{name: 2025-06-31}]", "[" * 5000, None]
)
async def test_a_file_that_can_t_be_read_leaves_the_former_keys(keys, followed, content, caplog):
    loaded, files = followed
    if content is None:
        keys.unlink()
    else:
        keys.write_text(content)
    for _ in range(3):
        await files.turn()
    assert tenant(loaded, "bob").name == "bob"
    assert [record.message.split()[0] for record in caplog.records] == ["api_keys_not_reloaded"]


async def test_files_are_followed_after_a_defect(keys, caplog):
    contents = []

    def read():
        contents.append(keys.read_text())
        return 1 / (len(contents) - 1)

    files = FollowedFiles("api_keys", [keys], read, lambda _: None)
    for text in ("a", "bb"):
        keys.write_text(text)
        await files.turn()
    assert contents == ["a", "bb"] and "ZeroDivisionError" in caplog.text


async def test_a_file_that_stays_is_not_read_again(keys):
    read = []
    files = FollowedFiles("api_keys", [keys], lambda: read.append(1), lambda _: None)
    await files.turn()
    os.utime(keys, ns=(0, 0))
    await files.turn()
    await files.turn()
    assert read == [1]


def test_a_port_with_tls_takes_new_certificates_and_keys_while_it_serves(tmp_path, keys):
    certificate, key = write_pair(tmp_path / "tls", "first")
    options = ("--tls-cert", certificate, "--tls-key", key, "--api-keys", str(keys))
    with frontend_server(tmp_path, *options, has_tls=True) as server:

        def shown():
            """Return the certificate that a new connection gets, verified by the file that is there now."""
            return ssl.get_server_certificate(("127.0.0.1", server.port), ca_certs=certificate)

        def status(name):
            return server.call("GET", "/v1/models", headers={"authorization": f"Bearer {name}"})[0]

        first = shown()
        old = connect(f"127.0.0.1:{server.port}", 10, has_tls=True)
        old.request("GET", "/health/live")
        assert old.getresponse().read() and (status("bob"), status("carol")) == (200, 401)
        write_keys(keys, alice={}, carol={})
        write_pair(tmp_path / "tls", "second")
        wait_for(lambda: status("carol") == 200)
        wait_for(lambda: "tls_reloaded" in server.log.read_text())
        assert status("bob") == 401 and shown() != first
        old.request("GET", "/health/live")
        assert old.getresponse().read()
        (tmp_path / "tls" / "pair.key").write_text("nonsense")
        wait_for(lambda: "tls_not_reloaded" in server.log.read_text())
        assert server.call("GET", "/health/live")[0] == 200


def test_a_pair_that_does_not_belong_together_is_refused_by_its_names(tmp_path):
    (one, _), (_, other) = write_pair(tmp_path / "a", "a"), write_pair(tmp_path / "b", "b")
    for certificate, key in ((one, other), (one, str(tmp_path / "none")), (other, other)):
        with pytest.raises(ConfigError, match="--tls-cert .*, --tls-key .*: they can't be used"):
            TlsFiles(Path(certificate), Path(key))


def test_a_certificate_without_a_key_is_refused_before_anything_is_served(tmp_path):
    assert main(["--recipe", "recipes/tiny-chat", "--grpc", "127.0.0.1:1", "--tls-cert", str(tmp_path)]) == WRONG
