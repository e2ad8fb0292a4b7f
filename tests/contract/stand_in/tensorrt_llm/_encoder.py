"""MultimodalEncoder and the handles of its embeddings; each is opened once, while its maker keeps the tensor."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import secrets
import types
import weakref
from multiprocessing import shared_memory
from typing import Any

import torch

from tensorrt_llm import _contract
from tensorrt_llm._results import CompletionOutput, RequestOutput, Response
from tensorrt_llm._values import DisaggregatedParams, SamplingParams

_KEYS = _contract.contract()["shared_tensor_container"]["method_key"]


class SharedTensorContainer:
    """A tensor in shared memory of one host, which goes with whoever made it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, local: bool = False) -> SharedTensorContainer:
        data = tensor.detach().to("cpu").contiguous()
        raw = data.view(torch.uint8).numpy().tobytes()
        segment = shared_memory.SharedMemory(create=True, size=max(1, len(raw)), name=f"trtllm-{secrets.token_hex(6)}")
        segment.buf[: len(raw)] = raw
        handle = base64.b64encode(segment.name.encode()).decode()
        segment.close()
        made = cls(
            {
                "method_key": _KEYS["cpu_shm"],
                "tensor_size": list(data.shape),
                "tensor_stride": list(data.stride()),
                "tensor_storage_offset": 0,
                "storage_handle": handle,
                "manager_handle": "",
                "storage_size": len(raw),
                "storage_dtype": str(data.dtype).removeprefix("torch."),
            }
        )
        weakref.finalize(made, _let_go, segment.name)
        return made

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> SharedTensorContainer:
        return cls(content)

    def dump_to_dict(self) -> dict[str, Any]:
        return self._content

    def get_local_view(self) -> torch.Tensor:
        """Return the tensor; a second opening fails, as the real one's reference count does."""
        segment = shared_memory.SharedMemory(base64.b64decode(self._content["storage_handle"]).decode())
        dtype, size = getattr(torch, self._content["storage_dtype"]), self._content["storage_size"]
        tensor = torch.frombuffer(bytearray(segment.buf[:size]), dtype=dtype).reshape(self._content["tensor_size"])
        segment.close()
        segment.unlink()
        return tensor


def _let_go(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # it was opened
        segment = shared_memory.SharedMemory(name)
        segment.close()
        segment.unlink()


class MultimodalEncoder:
    """Turns pictures in `multi_modal_data` into handles of the model's own embeddings."""

    def __init__(
        self,
        model: str,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        from tensorrt_llm._settings import TorchLlmArgs

        self.args = TorchLlmArgs(
            model=model,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            **{"max_num_tokens": 16384} | kwargs,
        )
        self.args.mm_encoder_only = True
        self._made: collections.deque[SharedTensorContainer] = collections.deque(maxlen=64)

    def generate(self, inputs: Any, use_tqdm: bool = True) -> Any:
        """Return a result for each input, with the handle of its picture's embeddings."""
        return [self._result(one["multi_modal_data"]["image"]) for one in inputs]

    def generate_async(self, inputs: Any, sampling_params: Any = None) -> RequestOutput:
        result = RequestOutput(1, [0], sampling_params or SamplingParams(), lambda client_id: None)
        params = self._result(inputs["multi_modal_data"]["image"]).disaggregated_params
        result.put(Response(finish_reason="length", disaggregated_params=params))
        return result

    def _result(self, images: list[Any]) -> Any:
        model, processor = _load_tower(str(self.args.model))
        processed = processor(images=images, return_tensors="pt")
        with torch.inference_mode():
            features = model.model.get_image_features(**processed, return_dict=True).pooler_output
        made = [SharedTensorContainer.from_tensor(tensor) for tensor in features]
        self._made += made
        handles = [one.dump_to_dict() for one in made]
        hashes = [[int(value) for value in torch.randint(0, 2**31 - 1, (8,))] for _ in handles]
        params = DisaggregatedParams(multimodal_embedding_handles=handles, multimodal_hashes=hashes)
        output = CompletionOutput(0, disaggregated_params=params if _contract.FROM_1_3 else None)
        return types.SimpleNamespace(outputs=[output], disaggregated_params=params, mm_embedding_handle=handles[0])

    def shutdown(self) -> None:
        pass


@functools.cache
def _load_tower(folder: str) -> tuple[Any, Any]:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoImageProcessor.from_pretrained(folder, local_files_only=True)
