"""An EAGLE-3 head's folder: config.json and model.safetensors, checked against its base model before anything is read.

The layout is the one that SafeAILab publishes (github.com/SafeAILab/EAGLE, eagle/model/cnets.py). `d2t` has what is
added to a draft id to get the base model's, `t2d` which of the base's ids there are drafts of. Which layers are tapped
stands in `eagle_config`, under SGLang's name; where it does not, it is what the published heads were trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bireme.engines.torch.weights.eagle_bytes import NUM_TAPS, EagleWidths
from bireme.errors import ConfigError, one_line

WEIGHTS = "model.safetensors"
_FITTING = "name a head that was trained for this model"
_Count = Annotated[int, Meta(ge=1)]


class BaseModel(Protocol):
    """What of a base model's configuration (transformers') a head must fit."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int


class _Taps(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: list[Annotated[int, Meta(ge=0)]] = []


class _Config(msgspec.Struct, kw_only=True):
    """Of config.json what the arithmetic depends on; values of others that change it are refused."""

    architectures: list[str] = []
    hidden_size: _Count
    intermediate_size: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    num_hidden_layers: int = 1
    vocab_size: _Count
    draft_vocab_size: _Count | None = None
    target_hidden_size: _Count | None = None
    rms_norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    eagle_config: _Taps | None = None


_ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
_ONE_WAY: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "norm_before_residual": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EagleShape:
    """h: hidden size of the head, b: of its base."""

    hidden_size: int
    base_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # the base's
    draft_vocab_size: int
    eps: float
    taps: tuple[int, ...]  # the layers whose outputs it reads, counted from 0
    rotary: dict[str, Any]  # config.json, as transformers' LlamaConfig takes it

    @property
    def widths(self) -> EagleWidths:
        return EagleWidths(
            base=self.base_hidden_size,
            hidden=self.hidden_size,
            queries=self.num_heads * self.head_size,
            row=2 * self.num_kv_heads * self.head_size,
            vocab=self.vocab_size,
            draft_vocab=self.draft_vocab_size,
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The names of the layout's weights, but for the embeddings, and their shapes."""
        hidden, wide, size = self.hidden_size, self.intermediate_size, self.head_size
        return {
            "fc.weight": (hidden, NUM_TAPS * self.base_hidden_size),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (self.num_heads * size, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (self.num_kv_heads * size, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (self.num_kv_heads * size, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, self.num_heads * size),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.mlp.gate_proj.weight": (wide, hidden),
            "midlayer.mlp.up_proj.weight": (wide, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, wide),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    shape: EagleShape
    tensors: Mapping[str, Tensor]  # by the layout's names, as stored; `embed_tokens.weight` where the head has its own
    base_ids: Tensor  # (draft vocabulary,) int64: the base's id of each draft id


def read_eagle(folder: Path, base: BaseModel) -> EagleCheckpoint:
    """Read a head. Raises ConfigError naming file, field or tensor, what it is, what it should be, and the remedy."""
    shape = read_shape(folder, base)
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            _check_shapes(path, shape, found)
            tensors = {name: file.get_tensor(name) for name in found}
    except FileNotFoundError as error:
        raise ConfigError(
            f"speculative_model: {folder.name} has no {WEIGHTS}; a head's weights are read as safetensors alone:"
            " convert its pytorch_model.bin, or fetch it again"
        ) from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"speculative_model: {_name(path)} is corrupted: {one_line(error)}; fetch it again"
        ) from error
    base_ids = _base_ids(path, shape, tensors.pop("d2t", None), tensors.pop("t2d", None))
    return EagleCheckpoint(shape, tensors, base_ids)


def read_shape(folder: Path, base: BaseModel) -> EagleShape:
    """Read a head's config.json. Raises ConfigError, also where it is of another base."""
    path = folder / "config.json"
    name = _name(path)
    try:
        text = path.read_bytes()
        config = msgspec.json.decode(text, type=_Config)
        rotary = msgspec.json.decode(text)
    except OSError as error:
        raise ConfigError(f"speculative_model: {name} can't be read: {error.strerror}; name a head's folder") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"speculative_model: {name}: {error}; a configuration of LlamaForCausalLMEagle3 is expected"
        ) from error
    if config.architectures and config.architectures[0] not in _ARCHITECTURES:
        raise ConfigError(
            f"speculative_model: {name}: architectures is {config.architectures[0]}; heads of EAGLE-3 in SafeAILab's"
            f" layout are read ({_ARCHITECTURES[0]})"
        )
    for field, only in _ONE_WAY.items():
        if (given := getattr(config, field)) != only:
            raise ConfigError(f"speculative_model: {name}: {field} is {given}; heads with {only} are computed")
    _check_base(name, config, base)
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise ConfigError(
            f"speculative_model: {name}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if (draft_vocab := config.draft_vocab_size or config.vocab_size) > config.vocab_size:
        raise ConfigError(
            f"speculative_model: {name}: draft_vocab_size {draft_vocab} is more than vocab_size {config.vocab_size}"
        )
    return EagleShape(
        hidden_size=config.hidden_size,
        base_hidden_size=base.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=config.head_dim or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab,
        eps=config.rms_norm_eps,
        taps=_taps(name, config, base.num_hidden_layers),
        rotary=rotary,
    )


def _check_base(name: str, config: _Config, base: BaseModel) -> None:
    read = config.target_hidden_size or config.hidden_size
    if read != base.hidden_size:
        field = "target_hidden_size" if config.target_hidden_size else "hidden_size"
        raise ConfigError(f"speculative_model: {name}: {field} is {read}, the model's {base.hidden_size}; {_FITTING}")
    if config.vocab_size != base.vocab_size:
        raise ConfigError(
            f"speculative_model: {name}: vocab_size is {config.vocab_size}, the model's {base.vocab_size}; {_FITTING}"
        )


def _taps(name: str, config: _Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are read; the published heads' are named there as inputs of the next ones."""
    told = config.eagle_config.eagle_aux_hidden_state_layer_ids if config.eagle_config else []
    taps = tuple(told) or (1, num_layers // 2 - 1, num_layers - 4)
    if len(taps) != NUM_TAPS or list(taps) != sorted(taps) or min(taps) < 0 or taps[-1] >= num_layers:
        given = f"are {list(taps)}" if told else f"would be {list(taps)}, which it doesn't say"
        raise ConfigError(
            f"speculative_model: {name}: the layers that it reads (eagle_config.eagle_aux_hidden_state_layer_ids)"
            f" {given}; {NUM_TAPS} of the model's 0 to {num_layers - 1} are expected, in this order; {_FITTING}"
        )
    return taps


def _check_shapes(path: Path, shape: EagleShape, found: Mapping[str, tuple[int, ...]]) -> None:
    name, expected = _name(path), dict(shape.tensors)
    if missing := sorted(expected.keys() - found.keys()):
        raise ConfigError(
            f"speculative_model: {name} lacks {len(missing)} of an EAGLE-3 head's tensors, {missing[0]} among them;"
            " it is incomplete, or no head in SafeAILab's layout"
        )
    optional: dict[str, tuple[int, ...]] = {
        "d2t": (shape.draft_vocab_size,),
        "t2d": (shape.vocab_size,),
        "embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
    }
    if other := sorted(found.keys() - expected.keys() - optional.keys()):
        raise ConfigError(
            f"speculative_model: {name} has {len(other)} tensors that an EAGLE-3 head has not, {other[0]} among them;"
            " heads of other layouts are not read"
        )
    for tensor, own in found.items():
        if own != (wanted := (expected | optional)[tensor]):
            raise ConfigError(
                f"speculative_model: {name}: {tensor} is {list(own)}, and by config.json {list(wanted)}; the two files"
                f" are of different heads, or of another model's: {_FITTING}"
            )
    for tensor, field, is_own in (
        ("d2t", "draft_vocab_size", shape.draft_vocab_size < shape.vocab_size),
        ("embed_tokens.weight", "hidden_size", shape.hidden_size != shape.base_hidden_size),
    ):
        if is_own and tensor not in found:
            raise ConfigError(
                f"speculative_model: {name} lacks {tensor}, which a head needs whose {field} is not the model's; fetch"
                " it again"
            )


def _base_ids(path: Path, shape: EagleShape, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    ids = torch.arange(shape.draft_vocab_size)
    if d2t is not None:
        if d2t.dtype.is_floating_point or d2t.dtype is torch.bool:
            raise ConfigError(f"speculative_model: {_name(path)}: d2t is of {d2t.dtype}; integers are expected")
        ids = ids + d2t.long()
    outside = (ids < 0) | (ids >= shape.vocab_size)
    if outside.any():
        draft = int(outside.nonzero()[0, 0])
        raise ConfigError(
            f"speculative_model: {_name(path)}: d2t makes draft id {draft} token {int(ids[draft])}; the model's are 0"
            f" to {shape.vocab_size - 1}; {_FITTING}"
        )
    if t2d is not None:
        named = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if not torch.equal(named, t2d.bool()):
            token = int((named != t2d.bool()).nonzero()[0, 0])
            raise ConfigError(
                f"speculative_model: {_name(path)}: d2t and t2d disagree about token {token}; fetch it again"
            )
    return ids


def _name(path: Path) -> str:
    """Return what messages call a file: never its path."""
    return f"{path.parent.name}/{path.name}"
