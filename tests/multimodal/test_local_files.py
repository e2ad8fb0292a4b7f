import os

import pytest

from bireme.config import MediaLimits
from bireme.errors import ConfigError, RequestError
from bireme.multimodal.budget import Budget
from bireme.multimodal.local_files import LocalFiles


@pytest.fixture
def folders(tmp_path):
    """allowed/a.png may be read; outside/secret and allowed-too/secret may not."""
    for name in ("allowed/deeper", "outside", "allowed-too"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "allowed/a b.png").write_bytes(b"picture")
    for name in ("outside", "allowed-too"):
        (tmp_path / name / "secret").write_bytes(b"secret")
    return tmp_path


def read(folders, url, **limits):
    limits = MediaLimits(**{"allowed_local_media_path": str(folders / "allowed"), **limits})
    return LocalFiles(limits).read(url, Budget(limits).picture())


def refusal(folders, url, **limits):
    with pytest.raises(RequestError) as refused:
        read(folders, url, **limits)
    assert str(folders) not in str(refused.value) and "secret" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_of_the_folder_is_read(folders, host):
    assert read(folders, f"file://{host}{folders}/allowed/a%20b.png") == b"picture"


def test_a_link_inside_the_folder_is_followed(folders):
    (folders / "allowed/deeper/link.png").symlink_to("../a b.png")
    assert read(folders, f"file://{folders}/allowed/deeper/link.png") == b"picture"


def test_without_an_allowed_folder_nothing_is_read(folders):
    assert "allowed_local_media_path" in refusal(
        folders, f"file://{folders}/allowed/a b.png", allowed_local_media_path=""
    )


@pytest.mark.parametrize(
    "path",
    [
        "outside/secret",
        "allowed-too/secret",
        "allowed/../outside/secret",
        "allowed/%2e%2e/outside/secret",
        "allowed/link",
        "allowed/up/outside/secret",
        "allowed/missing.png",
        "allowed/loop",
        "allowed/a%00.png",
        "allowed/deeper",
        "allowed/fifo",
    ],
)
def test_what_is_outside_missing_or_no_file_gets_one_and_the_same_answer(folders, path):
    (folders / "allowed/link").symlink_to(folders / "outside/secret")
    (folders / "allowed/up").symlink_to(folders)
    (folders / "allowed/loop").symlink_to("loop")
    os.mkfifo(folders / "allowed/fifo")
    assert (
        refusal(folders, f"file://{folders}/{path}") == "no such picture in this deployment's allowed_local_media_path"
    )


@pytest.mark.parametrize("path", ["outside/secret", "allowed/../outside/secret", "allowed/link"])
def test_what_is_outside_is_not_even_opened(folders, monkeypatch, path):
    (folders / "allowed/link").symlink_to(folders / "outside/secret")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    refusal(folders, f"file://{folders}/{path}")


def test_a_link_swapped_in_after_the_check_is_refused(folders, monkeypatch):
    """The folder becomes a link between resolving and opening."""
    (folders / "allowed/deeper/secret").write_bytes(b"harmless")
    real = os.open

    def swap_then_open(path, flags):
        (folders / "allowed/deeper").rename(folders / "allowed/moved")
        (folders / "allowed/deeper").symlink_to(folders / "outside")
        return real(path, flags)

    monkeypatch.setattr(os, "open", swap_then_open)
    assert "no such picture" in refusal(folders, f"file://{folders}/allowed/deeper/secret")


@pytest.mark.parametrize(
    "url", ["file://host/a.png", "file:a.png", "file:", "file:///a.png?x", "file:///a.png#x", "file://[/a"]
)
def test_other_forms_of_file_urls_are_refused(folders, url):
    assert "file:///folder/picture.png" in refusal(folders, url)


def test_a_file_over_the_limit_is_refused(folders):
    url = f"file://{folders}/allowed/a%20b.png"
    assert "7 bytes; at most 5" in refusal(folders, url, max_image_bytes=5)
    assert read(folders, url, max_image_bytes=7) == b"picture"


def test_a_device_that_never_ends_is_refused(folders):
    assert "no such picture" in refusal(folders, "file:///dev/zero", allowed_local_media_path="/dev")


@pytest.mark.parametrize("path", ["media", "/nowhere/at/all"])
def test_a_folder_that_is_not_there_is_a_configuration_error(path):
    with pytest.raises(ConfigError, match="absolute path of a folder"):
        LocalFiles(MediaLimits(allowed_local_media_path=path))
