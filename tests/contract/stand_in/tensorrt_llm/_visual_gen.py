"""VisualGen as 1.3 has it: blocking generation, uint8 tensors, no cancellation, refusal of unknown arguments."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import pydantic
import torch

from tensorrt_llm import _contract

_TABLE = _contract.contract()["visual_gen"]
_CLASSES = _contract.contract()["config_classes"]


class VisualGenError(RuntimeError): ...


class VisualGenParamsError(VisualGenError, ValueError): ...


VisualGenParams = dataclasses.make_dataclass(
    "VisualGenParams",
    [(name, Any, dataclasses.field(default=value)) for name, value in _TABLE["VisualGenParams"].items()],
)
VisualGenArgs = pydantic.create_model(
    "VisualGenArgs",
    __config__=pydantic.ConfigDict(extra="forbid", protected_namespaces=()),
    **{name: (Any, ... if len(entry) > 2 else entry[1]) for name, entry in _CLASSES["VisualGenArgs"].items()},
)


class VisualGenResult:
    """What generate_async returns; here the work is done by then."""

    done = True

    def __init__(self, output: Any) -> None:
        self._output = output

    def result(self, timeout: float | None = None) -> Any:
        if self._output.error is not None:
            raise RuntimeError(f"Generation failed: {self._output.error}")
        return self._output

    def cancel(self) -> None:
        raise NotImplementedError(_TABLE["VisualGenResult"]["cancel"])


class VisualGen:
    """One generation at a time; the picture's color is the seed, its brightness the frame."""

    made: list[VisualGen] = []

    def __init__(self, model: Any, args: Any = None) -> None:
        if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
            raise RuntimeError("external launch: waits for other ranks for ever")
        self.model, self.args, self.calls, self.is_shut_down = model, args, [], False
        self.default_params = VisualGenParams(
            height=480, width=832, num_inference_steps=50, guidance_scale=5.0, num_frames=81, frame_rate=16.0
        )
        VisualGen.made.append(self)

    def generate(self, inputs: Any, params: Any = None) -> Any:
        return self.generate_async(inputs, params).result()

    def generate_async(self, inputs: Any, params: Any = None) -> VisualGenResult:
        self.calls.append((inputs, params))
        if params.height % 16 or params.width % 16:
            raise VisualGenParamsError(f"height {params.height} and width {params.width} must be multiples of 16")
        count = params.num_frames or 1
        pixels = torch.full((1, count, params.height, params.width, 3), params.seed % 256, dtype=torch.uint8)
        pixels[..., 1] = torch.arange(count, dtype=torch.uint8)[None, :, None, None]
        is_image = params.num_frames is None
        error = "out of memory" if inputs == "too much" else None
        image, video = (pixels[:, 0], None) if is_image else (None, pixels)
        return VisualGenResult(SimpleNamespace(request_id=-1, image=image, video=video, error=error))

    def shutdown(self) -> None:
        self.is_shut_down = True
