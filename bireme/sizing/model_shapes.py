"""What a model weighs, keeps and computes for a token, out of its config.json: no weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bireme.errors import ConfigError
from bireme.sizing.machines import Format

Config = Mapping[str, Any]

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
# A weight's bytes; of 4 bits with the scale of each 16 (NVFP4) or 32 (MXFP4) of them.
FORMAT_BYTES: Mapping[Format, float] = {"bf16": 2, "fp8": 1, "fp8_blocks": 1, "nvfp4": 0.5625, "mxfp4": 0.53125}
_SHORT_TYPE_BYTES = 2  # embeddings, norms, and what a quantized checkpoint leaves out
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_MOST_LAYERS = 10_000
_BY_HAND = "write the recipe by hand, tools/check_recipe.py checks it"
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_UNLIKE_LAYERS = (  # of a state in place of rows, or of rows and products that differ from layer to layer
    *("ssm_cfg", "hybrid_override_pattern", "mamba_d_state", "mamba_num_heads", "linear_attn_config"),
    *("block_configs", "global_head_dim", "compress_ratios"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameters are counted from the shapes; `scale` fits them to the checkpoint's bytes where these are at hand."""

    name: str  # folder, or hub id
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    kv_row_values: int  # of a token in a layer: keys and values, or the latent vector of both
    is_latent: bool  # multi-head latent attention: the row has no heads to split
    windows: tuple[int, ...]  # of each layer; 0: it sees all
    attention_params: float  # of all layers
    mlp_params: float  # of layers without experts, and of experts that see every token
    expert_params: float  # of all routed experts of all layers
    embedding_params: float
    num_experts: int  # of a layer; 0: a dense model
    experts_per_token: int
    weights: Format
    are_attention_weights_quantized: bool
    max_seq_len: int
    num_draft_layers: int  # multi-token prediction that the checkpoint brings
    has_own_code: bool  # its configuration class comes with the checkpoint
    scale: float = 1.0

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 0

    @property
    def attention_bytes(self) -> float:
        size = FORMAT_BYTES[self.weights] if self.are_attention_weights_quantized else _SHORT_TYPE_BYTES
        return self.scale * self.attention_params * size

    @property
    def mlp_bytes(self) -> float:
        return self.scale * self.mlp_params * FORMAT_BYTES[self.weights]

    @property
    def expert_bytes(self) -> float:
        return self.scale * self.expert_params * FORMAT_BYTES[self.weights]

    @property
    def embedding_bytes(self) -> float:
        return self.scale * self.embedding_params * _SHORT_TYPE_BYTES

    @property
    def weight_bytes(self) -> float:
        return self.attention_bytes + self.mlp_bytes + self.expert_bytes + self.embedding_bytes

    @property
    def active_params(self) -> float:
        """Those that a token is multiplied with."""
        experts = self.expert_params * self.experts_per_token / self.num_experts if self.num_experts else 0.0
        return self.attention_params + self.mlp_params + experts + self.embedding_params / 2

    @property
    def kv_values_per_token(self) -> int:
        return self.kv_row_values * self.num_layers

    def kv_values(self, num_tokens: int) -> int:
        """Return what a sequence keeps: of a layer with a window no more than that."""
        return self.kv_row_values * sum(min(num_tokens, window or num_tokens) for window in self.windows)


def read_shape(model: str, config_file: Path | None = None) -> ModelShape:
    """Return the shape of a model: a folder, or a hub id with its `config_file`. Raises ConfigError."""
    folder = Path(model)
    if config_file is None and not folder.is_dir():
        raise ConfigError(
            f"--model {model}: no such folder; for a hub id give its config.json with --config FILE, nothing is fetched"
        )
    path = config_file or folder / "config.json"
    config = _read_json(path)
    beside = path.parent / "hf_quant_config.json"
    own = _read_json(beside) if beside.is_file() else {}
    shape = shape_of(config, own.get("quantization") or {}, model, str(path))
    found = _checkpoint_bytes(folder) if folder.is_dir() else 0
    return replace(shape, scale=found / shape.weight_bytes) if found else shape


def shape_of(config: Config, quantization: Config, name: str, where: str) -> ModelShape:
    """`quantization`: that of hf_quant_config.json; else config.json's counts. Raises ConfigError."""
    try:
        text = config.get("text_config") or config
        _check_kind(config, text, where)
        outer = quantization or config.get("quantization_config") or text.get("quantization_config") or {}
        shape = _shape(config, text, outer, name, where)
        _check_sizes(shape)
    except KeyError as error:
        raise ConfigError(f"{where}: {error} is not there, so the model's size is not known") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{where}: not the shape of a model: {error}") from error
    return shape


def _shape(config: Config, text: Config, quantization: Config, name: str, where: str) -> ModelShape:
    layers, hidden, heads = (int(text[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if min(layers, hidden, heads) < 1 or layers > _MOST_LAYERS:
        raise ValueError(f"{layers} layers of {hidden} with {heads} heads")
    experts = next((int(text[key]) for key in _EXPERT_KEYS if text.get(key)), 0)
    sparse = _sparse_layers(text, layers) if experts else 0
    attention = _attention_params(text, hidden, heads)
    weights, is_whole = _weights(quantization, where)
    expert_size = 3 * hidden * int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    shared = _shared_params(text, hidden) * sparse + (hidden * experts * sparse)
    dense_size = 3 * hidden * int(text.get("intermediate_size_mlp") or text.get("intermediate_size") or 0)
    row_values, kv_heads = _kv_row(text, hidden, heads)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        kv_row_values=row_values,
        is_latent=bool(text.get("kv_lora_rank")),
        windows=tuple(windows_of(text)),
        attention_params=attention * layers,
        mlp_params=dense_size * (layers - sparse) + shared,
        expert_params=expert_size * experts * sparse,
        embedding_params=int(text["vocab_size"]) * hidden * (1 if _is_tied(config, text) else 2),
        num_experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or text.get("experts_per_token") or 1) if experts else 1,
        weights=weights,
        are_attention_weights_quantized=is_whole,
        max_seq_len=int(text.get("max_position_embeddings") or 8192),
        num_draft_layers=int(text.get("num_nextn_predict_layers") or 0),
        has_own_code=bool(config.get("auto_map")),
    )


def _check_sizes(shape: ModelShape) -> None:
    """Raises ValueError for what no model is."""
    counted = (shape.attention_params, shape.embedding_params, shape.kv_row_values, shape.num_kv_heads)
    if min(counted) < 1 or min(shape.mlp_params, shape.expert_params, shape.num_draft_layers, *shape.windows) < 0:
        raise ValueError("a size is less than nothing")
    if shape.num_experts < 0 or not 1 <= shape.experts_per_token <= max(shape.num_experts, 1):
        raise ValueError(f"{shape.experts_per_token} of {shape.num_experts} experts for a token")
    if len(shape.windows) != shape.num_layers:
        raise ValueError(f"layer_types has {len(shape.windows)} of {shape.num_layers} layers")


def kv_row_bytes(config: Config, value_bytes: int | None = None) -> int:
    """Return the bytes of one token's keys and values in one layer. Raises KeyError.

    `value_bytes`: of a number; None: as the model's own type has.
    """
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    heads = config["num_attention_heads"]
    hidden = 0 if config.get("head_dim") or config.get("kv_lora_rank") else config["hidden_size"]
    return _kv_row(config, hidden, heads)[0] * (value_bytes or _DTYPE_BYTES.get(dtype, 2))


def windows_of(config: Config) -> list[int]:
    """Return each layer's window; 0: it sees all. Raises KeyError."""
    window = int(config.get("sliding_window") or 0)
    if kinds := config.get("layer_types"):
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if config.get("use_sliding_window") is False:
        return [0] * config["num_hidden_layers"]
    return [window] * config["num_hidden_layers"]


def _kv_row(text: Config, hidden: int, heads: int) -> tuple[int, int]:
    """Return a row's values and the heads that they can be split by."""
    if latent := text.get("kv_lora_rank"):  # keys and values are one vector
        return int(latent + text["qk_rope_head_dim"] + int(text.get("index_head_dim") or 0)), 1
    kv_heads = int(text.get("num_key_value_heads") or heads)
    return 2 * kv_heads * int(text.get("head_dim") or hidden // heads), kv_heads


def _check_kind(config: Config, text: Config, where: str) -> None:
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: is_encoder_decoder; recipes serve models that only decode")
    for key in _UNLIKE_LAYERS:
        if text.get(key):
            raise ConfigError(
                f"{where}: {key}; its layers are unlike each other, or keep no row for each token: {_BY_HAND}"
            )
    kinds = text.get("layer_types") or []
    if unknown := sorted({str(kind) for kind in kinds} - set(_ATTENTION_LAYERS)):
        raise ConfigError(
            f"{where}: layer_types has {', '.join(unknown)}; such layers keep no row for each token: {_BY_HAND}"
        )


def _sparse_layers(text: Config, layers: int) -> int:
    """Return how many layers have experts."""
    first = int(text.get("first_k_dense_replace") or 0)
    every = int(text.get("interleave_moe_layer_step") or text.get("decoder_sparse_step") or 1)
    return len(range(first, layers)) // every - len(text.get("mlp_only_layers") or [])


def _shared_params(text: Config, hidden: int) -> int:
    """Return the parameters of a layer's experts that see every token."""
    if size := text.get("shared_expert_intermediate_size"):
        return 3 * hidden * int(size)
    if str(text.get("model_type", "")).startswith("llama4"):  # one, as large as the others
        return 3 * hidden * int(text["intermediate_size"])
    return 3 * hidden * int(text.get("moe_intermediate_size") or 0) * int(text.get("n_shared_experts") or 0)


def _attention_params(text: Config, hidden: int, heads: int) -> int:
    if not text.get("kv_lora_rank"):
        size = int(text.get("head_dim") or hidden // heads)
        return 2 * hidden * heads * size + 2 * hidden * int(text.get("num_key_value_heads") or heads) * size
    latent, rope, nope, value = (
        int(text[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    rank = int(text.get("q_lora_rank") or 0)
    queries = (hidden + heads * (nope + rope)) * rank if rank else hidden * heads * (nope + rope)
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _weights(quantization: Config, where: str) -> tuple[Format, bool]:
    """Return the weights' format, and whether attention has it too."""
    if not quantization:
        return "bf16", True
    left_out = [*(quantization.get("exclude_modules") or ()), *(quantization.get("ignore") or ())]
    left_out += quantization.get("modules_to_not_convert") or ()
    is_whole = not any("self_attn" in str(name) for name in left_out)
    name = str(quantization.get("quant_algo") or quantization.get("quant_method") or "").lower()
    if name in ("nvfp4", "mxfp4"):
        return ("nvfp4" if name == "nvfp4" else "mxfp4"), is_whole
    if name in ("fp8", "fp8_block_scales", "fbgemm_fp8"):
        return ("fp8_blocks" if quantization.get("weight_block_size") or "block" in name else "fp8"), is_whole
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    if groups and all((group.get("type"), group.get("num_bits")) == ("float", 8) for group in groups):
        return "fp8", is_whole
    raise ConfigError(
        f"{where}: quantization {name or 'without a name'}; BF16, FP8, NVFP4 and MXFP4 checkpoints are sized here"
    )


def _is_tied(config: Config, text: Config) -> bool:
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _checkpoint_bytes(folder: Path) -> int:
    """Return what the folder's weights take; 0: there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = (_read_json(index).get("metadata") or {}).get("total_size")
        if isinstance(total, int) and total > 0:
            return total
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; it says how large the model is: take it from the model's folder or page"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a JSON object is expected, not {type(tree).__name__}")
    return tree
