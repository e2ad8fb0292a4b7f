"""serve.py's options and exit codes, without a server."""

import os

import pytest

from bireme.launch.run_folder import RunFolder, default_base
from bireme.recipe_files import load_recipe
from tools import serve


def test_a_recipe_and_a_model_together_are_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse(["recipes/tiny", "--model", "x"])
    assert "not both" in capsys.readouterr().err


def test_options_become_settings(tmp_path):
    (tmp_path / "model").mkdir()
    model = str(tmp_path / "model")
    options = serve.parse(["--model", model, "--disaggregated", "--http-port", "23390", "--openai-port", "9000"])
    run = RunFolder(tmp_path / "base")
    settings = serve.settings_of(options, run)
    assert settings.ports.http == 23390 and set(settings.recipe.workers) == {"prefill", "decode"}
    assert settings.frontend is not None and settings.frontend.grpc == "127.0.0.1:8001"
    run.clear()  # for another life of the server, which needs the recipe as well
    assert load_recipe(settings.recipe.folder) == settings.recipe
    run.remove()


def test_client_shared_memory_is_off_unless_asked_for(tmp_path):
    settings = [
        serve.settings_of(serve.parse(["recipes/mocker", *more]), tmp_path) for more in ([], ["--allow-client-shm"])
    ]
    assert [one.allow_client_shm for one in settings] == [False, True]


def test_an_unknown_recipe_ends_with_code_2_and_names_the_nearest(capsys):
    assert serve.main(["recipes/tinny"]) == serve.WRONG
    assert "did you mean recipes/tiny" in capsys.readouterr().err


def test_a_broken_override_ends_with_code_2_and_leaves_no_folder(capsys):
    assert serve.main(["recipes/mocker", "--override", "{"]) == serve.WRONG
    assert "not valid JSON" in capsys.readouterr().err
    assert not list(default_base().glob(f"{os.getpid()}-*"))
