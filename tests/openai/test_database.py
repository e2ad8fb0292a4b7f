"""Which processes of a folder live."""

from __future__ import annotations

import errno
import os

import pytest

from bireme.openai.database import Lives


@pytest.fixture
def other(tmp_path):
    lives = Lives(tmp_path)
    yield lives
    lives.close()


@pytest.fixture
def own(tmp_path):
    lives = Lives(tmp_path)
    yield lives
    lives.close()


def test_a_process_lives_until_its_lock_is_free(own, other):
    assert own.has(other.own) and own.has(own.own)
    os.close(other._descriptor)
    other._descriptor = -1
    assert not own.has(other.own) and not own.has("unknown")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO])
def test_a_process_lives_while_its_file_can_t_be_opened(own, other, number, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert own.has(other.own)
    assert own.has(other.own)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
def test_a_process_without_a_file_is_gone(own, other, number, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert not own.has(other.own)
