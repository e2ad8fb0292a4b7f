"""Tiny models on disk, and what transformers' generate makes of the standard prompts; made once a session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bireme.engines.torch import native
from tests.engines.torch.quick_interpreter import make_quick

make_quick()


class TinyModel:
    """A model folder and its oracle."""

    def __init__(self, folder: Path, model_type: str, **changes: object) -> None:
        from tests.engines.torch import tiny_models

        self.path = tiny_models.save(folder, model_type, **changes)
        self.module = tiny_models.build(model_type, **changes)
        self._known: dict[tuple[object, ...], list[int]] = {}

    def expect(self, prompts: list[list[int]], num_tokens: int = 48, eos: int | None = None) -> list[list[int]]:
        """Return generate's greedy tokens."""
        from tests.engines.torch import tiny_models

        keys = [(tuple(prompt), num_tokens, eos) for prompt in prompts]
        if new := [key for key in dict.fromkeys(keys) if key not in self._known]:
            answers = tiny_models.generate(self.module, [list(prompt) for prompt, *_ in new], num_tokens, eos)
            self._known |= zip(new, answers, strict=True)
        return [self._known[key] for key in keys]


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of caches that has what is compiled for this machine, and no model folders of files in GGUF."""
    with contextlib.suppress(native.NativeUnavailableError):
        native.load()
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bireme"
    home = tmp_path_factory.mktemp("cache")
    (home / "bireme").mkdir(mode=0o700)
    for library in users.glob("decoder-*.so"):
        (home / "bireme" / library.name).symlink_to(library)
    return home


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has kernels share a row's tokens among four programs: short rows give one of them something to do, and
    Triton's interpreter runs them all, up to 64. Tests of the kernels themselves have each number that there is.
    """
    import torch

    if torch.cuda.is_available():
        return
    from bireme.engines.torch.forward import decode_state
    from bireme.engines.torch.kernels import decode_attention, paged_decode

    monkeypatch.setattr(paged_decode, "num_splits", lambda rows: 4)
    for module in (decode_attention, decode_state):
        monkeypatch.setattr(module, "most_parts", lambda num_kv_heads: 4)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return the tiny model of a name: llama, qwen3, gemma3 (window 32) or gpt_oss (sinks, window 32).

    What follows a space is the test's.
    """
    import torch

    from tests.engines.torch import tiny_models

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    kinds = {"llama": ("llama", {}), "qwen3": ("qwen3", {}), "gemma3": ("gemma3_text", tiny_models.WINDOW)}
    kinds["gpt_oss"] = ("gpt_oss", tiny_models.SETTINGS["gpt_oss"] | {"sliding_window": 32})
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        name = name.partition(" ")[0]
        if name not in made:
            kind, changes = kinds[name]
            made[name] = TinyModel(folder / name, kind, **changes)
        return made[name]

    return get
