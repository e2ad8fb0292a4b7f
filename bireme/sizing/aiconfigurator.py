"""Times from AIConfigurator's tables of measured operators (aiconfigurator-core 0.12), in a process of their own.

Its numpy is 2 or newer and that of a tritonserver's stub older, so it has a Python of its own. It asks no network: the
tables come with the package. Layouts that it has no tables for are left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bireme.errors import ConfigError
from bireme.sizing import aiconfigurator_process
from bireme.sizing.recipe_plan import Wish
from bireme.sizing.timings import RankLayout

_SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200"}
_END_S = 10.0
_HOW = (
    'make one: python -m venv .clients/aiconfigurator && .clients/aiconfigurator/bin/pip install -e ".[aiconfigurator]"'
)


class TableTimings:
    """A context manager: the process ends with it."""

    source = "from AIConfigurator 0.12's tables of measured operators, not measured as a whole"

    def __init__(self, wish: Wish, python: str, config_file: Path | None) -> None:
        """Raises ConfigError."""
        if not wish.kind.has_llm_args:
            raise ConfigError("--timings aiconfigurator: its tables are of TensorRT-LLM; use --engine trtllm, or peaks")
        path = shutil.which(python) if python else None
        if path is None:
            raise ConfigError(f"--timings-python {python or '(none)'}: no such program; {_HOW}")
        self.missing: dict[str, str] = {}  # layout -> why it has no times
        self._shape, self._gpu, self._value_bytes = wish.shape, wish.gpu, wish.value_bytes
        self._known: dict[str, float] = {}
        self._folder = tempfile.TemporaryDirectory()
        _copy_config(config_file or Path(wish.shape.name) / "config.json", Path(self._folder.name))
        self._process = subprocess.Popen(
            [path, aiconfigurator_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        first = self._read()
        if "error" in first:
            self.close()
            raise ConfigError(f"--timings-python {python}: {first['error']}; {_HOW}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()

    def prefill_ms(self, layout: RankLayout, num_tokens: int) -> float:
        return self._ask(layout, 0, {"prefill": num_tokens})

    def decode_ms(self, layout: RankLayout, num_rows: int, context: int, num_drafts: int) -> float:
        rows = num_rows // layout.ranks if layout.attention_dp else num_rows
        return self._ask(layout, num_drafts, {"rows": rows, "context": context})

    def _ask(self, layout: RankLayout, num_drafts: int, what: dict[str, Any]) -> float:
        line = json.dumps({"layout": self._arguments(layout, num_drafts), **what})
        if line not in self._known:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended: the answer says so
            answer = self._read()
            if "error" in answer:
                self.missing[layout.name] = answer["error"]
            self._known[line] = answer.get("ms", math.inf)
        return self._known[line]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            if line:
                return {"error": f"no answer but {line.strip()}"}
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            return {"error": f"it ended without an answer, exit code {self._process.poll()}"}
        return answer if isinstance(answer, dict) else {"error": f"no answer but {line.strip()}"}

    def _arguments(self, layout: RankLayout, num_drafts: int) -> dict[str, Any]:
        shape = self._shape
        arguments: dict[str, Any] = {
            "model_path": self._folder.name,
            "system": _SYSTEMS[self._gpu.name],
            "tp_size": layout.attention_ranks,
            "attention_dp_size": layout.ranks if layout.attention_dp else 1,
            "kvcache_quant_mode": "fp8" if self._value_bytes == 1 else "bfloat16",
            "nextn": num_drafts,
        }
        if layout.has_experts:
            arguments |= {"moe_tp_size": 1, "moe_ep_size": layout.ranks}
            if shape.weights == "mxfp4" and self._gpu.is_blackwell:
                arguments["moe_quant_mode"] = "w4a8_mxfp4_mxfp8"  # its default is what Hopper does
        if shape.is_latent:
            arguments["fmha_quant_mode"] = "bfloat16"  # it has no tables of latent attention in FP8
        return arguments


def _copy_config(path: Path, folder: Path) -> None:
    """The library reads a folder; the weights are not looked at."""
    shutil.copy(path, folder / "config.json")
    if (beside := path.parent / "hf_quant_config.json").is_file():
        shutil.copy(beside, folder)
