"""serve.py's options and exit codes, without a server."""

import pytest
import serve

from bireme.launch.run_folder import default_base


def test_a_recipe_and_a_model_together_are_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse(["recipes/tiny", "--model", "x"])
    assert "not both" in capsys.readouterr().err


def test_options_become_settings(tmp_path):
    (tmp_path / "model").mkdir()
    options = serve.parse(["--model", str(tmp_path / "model"), "--http-port", "23390", "--disaggregated"])
    settings = serve.settings_of(options, tmp_path)
    assert settings.ports.http == 23390 and set(settings.recipe.workers) == {"prefill", "decode"}


def test_client_shared_memory_is_off_unless_asked_for(tmp_path):
    settings = [
        serve.settings_of(serve.parse(["recipes/mocker", *more]), tmp_path) for more in ([], ["--allow-client-shm"])
    ]
    assert [one.allow_client_shm for one in settings] == [False, True]


def test_an_unknown_recipe_ends_with_code_2_and_names_the_nearest(capsys):
    assert serve.main(["recipes/tinny"]) == serve.WRONG
    assert "did you mean recipes/tiny" in capsys.readouterr().err


def test_a_broken_override_ends_with_code_2_and_leaves_no_folder(capsys):
    before = set(default_base().glob("*")) if default_base().exists() else set()
    assert serve.main(["recipes/mocker", "--override", "{"]) == serve.WRONG
    assert "not valid JSON" in capsys.readouterr().err
    assert not {path for path in default_base().glob("*") if path not in before}
