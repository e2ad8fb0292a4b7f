"""Llama's kind of decoder as data: the weights of a transformers model, arranged for the decoders of this engine.

`fused_decoder.py` computes it on a GPU, `packed_decoder.py` on a CPU. The projections of queries, keys and values are
one matrix, as are those of gate and up. The model's own modules keep views of them: they stay as usable as before, and
nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.geometry import ClampedGate, Mixture, Rotary, TopKRouter
from bireme.engines.torch.storage import Weight, WeightForm, form_of, with_tensors
from bireme.engines.torch.weights.architectures import FAMILIES
from bireme.engines.torch.weights.kept_experts import Mxfp4Experts
from bireme.engines.torch.weights.stored_linear import StoredLinear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: Tensor
    qkv: Weight  # ((H + 2 N) K, hidden)
    qkv_bias: Tensor | None
    output: Weight  # (hidden, H K)
    mlp_norm: Tensor
    gate_up: Weight  # (2 I, hidden); of E experts (E, 2 I, hidden)
    down: Weight  # (hidden, I); of E experts (E, hidden, I)
    rotary: Rotary
    scaling: float
    softcap: float = 0.0  # of attention's scores; 0: none
    attention_post_norm: Tensor | None = None  # of what attention and MLP add
    mlp_post_norm: Tensor | None = None
    mixture: Mixture | None = None  # of experts
    output_bias: Tensor | None = None
    sinks: Tensor | None = None  # (H,): scores that take a share of attention and bring no value


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embeddings: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Tensor
    eps: float
    num_heads: int
    is_gelu: bool = False  # tanh's approximation of it gates the MLP; else SiLU
    embed_scale: float = 1.0
    softcap: float = 0.0  # of the logits; 0: none
    form: WeightForm = WeightForm.PLAIN  # of the layers' projections, but for those that are plain beside others

    @property
    def stored_form(self) -> WeightForm:
        """What most weights are stored in: of a mixture its experts."""
        return form_of(self.layers[0].gate_up) if self.has_experts else self.form

    @property
    def has_experts(self) -> bool:
        return any(layer.mixture is not None for layer in self.layers)


def why_not_fused(model: Any) -> str:
    """Return what keeps a model from these decoders; empty: nothing does."""
    name = type(model).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(sorted(FAMILIES))}"
    layer = model.model.layers[0]
    if not _has_gate(activation := _activation(model)):
        return f"the MLP is gated by {activation}"
    if model.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype is {str(model.dtype).removeprefix('torch.')}"
    if _cos_sin(model.model, layer, 2).shape[1] != layer.self_attn.head_dim:
        return "only a part of each head is turned by its position"
    dense = [each.mlp for each in model.model.layers if not hasattr(each.mlp, "experts")]
    return "the MLP has a bias" if any(mlp.down_proj.bias is not None for mlp in dense) else ""


def fuse(model: Any, max_seq_len: int, for_kernels: bool = True) -> DecoderWeights:
    """Rearrange the weights of a model that `why_not_fused` has nothing against.

    `for_kernels`: each output's weights are to follow each other in memory.
    """
    body, config, is_gemma = model.model, model.config, type(model).__name__.startswith("Gemma")
    with torch.inference_mode(False), torch.no_grad():
        tables: dict[str, Tensor] = {}  # by kind of layer
        layers = []
        for layer in body.layers:
            kind = _kind(body, layer)
            if kind not in tables:
                tables[kind] = _cos_sin(body, layer, max_seq_len)
            layers.append(_fuse_layer(layer, tables[kind], is_gemma, for_kernels))
        norm = _norm(body.norm, is_gemma)
    return DecoderWeights(
        body.embed_tokens.weight.detach(),
        tuple(layers),
        norm,
        model.lm_head.weight.detach(),
        float(config.rms_norm_eps),
        int(config.num_attention_heads),
        _is_tanh_gelu(_activation(model)),
        config.hidden_size**0.5 if is_gemma else 1.0,
        float(getattr(config, "final_logit_softcapping", None) or 0.0),
        next((form for layer in layers for form in _forms(layer) if form is not WeightForm.PLAIN), WeightForm.PLAIN),
    )


def _forms(layer: DecoderLayer) -> list[WeightForm]:
    """Return those of a layer's projections. Experts have their own."""
    dense = (layer.gate_up, layer.down) if layer.mixture is None else ()
    return [form_of(weight) for weight in (layer.qkv, layer.output, *dense)]


def _fuse_layer(layer: Any, cos_sin: Tensor, is_gemma: bool, for_kernels: bool) -> DecoderLayer:
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    after_attention, before_mlp, after_mlp = None, layer.post_attention_layernorm, None
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2 and 3: what is added is normed, too
        after_attention, before_mlp = before_mlp, layer.pre_feedforward_layernorm
        after_mlp = layer.post_feedforward_layernorm
    gate_up, down, mixture = _fuse_mlp(layer.mlp, for_kernels)
    return DecoderLayer(
        attention_norm=_norm(layer.input_layernorm, is_gemma),
        qkv=_join(projections),
        qkv_bias=_bias(projections),
        output=_join((attention.o_proj,)),
        mlp_norm=_norm(before_mlp, is_gemma),
        gate_up=gate_up,
        down=down,
        rotary=_rotary(attention, cos_sin, is_gemma),
        scaling=float(attention.scaling),
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        attention_post_norm=_norm(after_attention, is_gemma),
        mlp_post_norm=_norm(after_mlp, is_gemma),
        mixture=mixture,
        output_bias=_bias((attention.o_proj,)),
        sinks=None if (sinks := getattr(attention, "sinks", None)) is None else sinks.detach(),
    )


def _fuse_mlp(mlp: Any, for_kernels: bool) -> tuple[Weight, Weight, Mixture | None]:
    """Return gate and up, down, and what a mixture has beside them."""
    experts = getattr(mlp, "experts", None)
    if experts is None:
        return _join((mlp.gate_proj, mlp.up_proj)), _join((mlp.down_proj,)), None
    if hasattr(mlp, "router"):
        return _fuse_clamped(mlp.router, experts, for_kernels)
    is_normed = bool(getattr(mlp.gate, "norm_topk_prob", True))  # Mixtral's has no such setting: it does
    router = TopKRouter(mlp.gate.weight.detach(), int(mlp.gate.top_k), is_normed)
    return experts.gate_up_proj.detach(), experts.down_proj.detach(), Mixture(router)


def _fuse_clamped(router: Any, experts: Any, for_kernels: bool) -> tuple[Weight, Weight, Mixture]:
    """Of gpt-oss, whose softmax over those chosen is one over all, normed."""
    mixture = Mixture(
        TopKRouter(router.weight.detach(), int(router.top_k), True, router.bias.detach()),
        experts.gate if isinstance(experts, Mxfp4Experts) else ClampedGate(float(experts.limit), float(experts.alpha)),
        experts.gate_up_proj_bias.detach(),
        experts.down_proj_bias.detach(),
    )
    if isinstance(experts, Mxfp4Experts):
        return experts.stored("gate_up_proj"), experts.stored("down_proj"), mixture
    turned = [parameter.detach().transpose(1, 2) for parameter in (experts.gate_up_proj, experts.down_proj)]
    if for_kernels:
        turned = [weights.contiguous() for weights in turned]
        for parameter, weights in zip((experts.gate_up_proj, experts.down_proj), turned, strict=True):
            parameter.data = weights.transpose(1, 2)
    return turned[0], turned[1], mixture


def _bias(parts: Sequence[Any]) -> Tensor | None:
    return None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])


def _rotary(attention: Any, cos_sin: Tensor, is_gemma: bool) -> Rotary:
    query, key = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    eps = 0.0 if query is None else float(getattr(query, "variance_epsilon", None) or query.eps)
    return Rotary(cos_sin, eps, _norm(query, is_gemma), _norm(key, is_gemma))


def _join(parts: Sequence[Any]) -> Weight:
    """Return the parts' weights as one matrix, of which they keep views."""
    if any(isinstance(part, StoredLinear) for part in parts):
        stored = [part.stored for part in parts]
        joined = {name: _one([own.tensors[name] for own in stored]) for name in stored[0].tensors}
        return with_tensors(stored[0], **joined)
    weights = [part.weight.detach() for part in parts]
    whole = _one(weights)
    if whole.data_ptr() != weights[0].data_ptr():
        for part, own in zip(parts, whole.split([len(weight) for weight in weights]), strict=True):
            part.weight.data = own
    return whole


def _one(parts: Sequence[Tensor]) -> Tensor:
    """Return them as one. Where they follow each other in memory, as shared weights do, they are one already."""
    if all(_follows(*pair) for pair in pairwise(parts)):
        return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    return torch.cat(list(parts))


def _follows(before: Tensor, weight: Tensor) -> bool:
    """Whether it begins in memory where the other one ends."""
    is_one = before.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    is_whole = before.is_contiguous() and weight.is_contiguous()
    return is_one and is_whole and bool(before.data_ptr() + before.nbytes == weight.data_ptr())


def _norm(module: Any, is_gemma: bool) -> Any:
    """Return what a norm multiplies by, which Gemma's keep less one; None where there is none."""
    if module is None:
        return None
    weight = module.weight.detach()
    return weight.float() + 1 if is_gemma else weight


def _kind(body: Any, layer: Any) -> str:
    """Return the name by which rotary positions tell layers apart; empty: they don't."""
    return str(layer.self_attn.layer_type) if hasattr(body.rotary_emb, "layer_types") else ""


def _cos_sin(body: Any, layer: Any, num_positions: int) -> Tensor:
    device = body.embed_tokens.weight.device
    positions, kind = torch.arange(num_positions, device=device)[None], _kind(body, layer)
    like = torch.zeros((), device=device)  # float32, whatever the model's dtype
    cos, sin = body.rotary_emb(like, positions, kind) if kind else body.rotary_emb(like, positions)
    half = cos.shape[-1] // 2
    if not cos.is_meta and not torch.equal(cos[..., :half], cos[..., half:]):  # gpt-oss' names each angle once
        half = cos.shape[-1]
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], 1).contiguous()


def _activation(model: Any) -> Any:
    """Return the function of the gate; None: it is a ClampedGate."""
    mlp = model.model.layers[0].mlp
    return None if hasattr(mlp, "router") else getattr(mlp, "experts", mlp).act_fn


def _has_gate(activation: Any) -> bool:
    return activation is None or _is_tanh_gelu(activation) or _is(activation, F.silu)


def _is_tanh_gelu(activation: Any) -> bool:
    return activation is not None and _is(activation, lambda x: F.gelu(x, approximate="tanh"))


def _is(activation: Any, expected: Callable[[Tensor], Tensor]) -> bool:
    """Families spell activations in too many ways: their values tell."""
    values = torch.linspace(-6, 6, 97)
    return bool(torch.allclose(activation(values), expected(values), rtol=0, atol=1e-6))
