"""An EAGLE-3 head (https://arxiv.org/abs/2503.01840): one layer that says which tokens a model would say next.

It reads what the base model made of a token, the outputs of three of its layers fused to one row, and the token that
follows. Where the base has not seen a token yet, because the head drafted it, its own row for it stands in.

Its keys and values are one more layer of the pools. `Attend` keeps and reads them with the base's own block ids, so
that they are reused, moved and preempted with it. Those of a pair of token and follower are at the token's place: a
step's rows go where the base's go, and the head runs when the step's followers are known. The last place of a block
that another request reuses may know of another follower: a draft is then worse, and no token another one.

Shapes: n rows, h hidden size, b the base's, H query heads, N key/value heads, K head size, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bireme.engines.torch.geometry import LayerGeometry, Rotary
from bireme.engines.torch.weights.eagle_checkpoint import EagleCheckpoint, EagleShape

# qkv (n, (H + 2 N) K), not turned by position yet and free to be overwritten; positions (n,) int64 -> (n, H K).
Attend = Callable[[Tensor, Tensor], Tensor]


class EagleHead(nn.Module):  # type: ignore[misc]
    """Computes in the dtype of its weights, norms in float32."""

    def __init__(self, shape: EagleShape, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Has room for weights, and none yet: see `of`."""
        super().__init__()
        self.shape, hidden, wide = shape, shape.hidden_size, shape.intermediate_size
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device))

        self.fc = weight(hidden, shape.tensors["fc.weight"][1])
        self.hidden_norm, self.input_norm = weight(hidden), weight(hidden)
        self.qkv, self.output = weight(heads, 2 * hidden), weight(hidden, shape.num_heads * shape.head_size)
        self.mlp_norm = weight(hidden)
        self.gate_up, self.down = weight(2 * wide, hidden), weight(hidden, wide)
        self.norm, self.lm_head = weight(hidden), weight(shape.draft_vocab_size, hidden)
        self.embeddings: nn.Parameter | None = None  # (vocabulary, h); None: the base's are its own
        self.base_ids: Tensor
        self.register_buffer("base_ids", torch.arange(shape.draft_vocab_size, device=device), persistent=False)

    @classmethod
    def of(cls, checkpoint: EagleCheckpoint, dtype: torch.dtype, device: torch.device | None = None) -> EagleHead:
        head = cls(checkpoint.shape, dtype, device)
        own = dict(checkpoint.tensors)
        with torch.no_grad():
            for parameter, names in _PARTS.items():
                whole = torch.cat([own[name] for name in names]) if len(names) > 1 else own[names[0]]
                getattr(head, parameter).copy_(whole)
        if (embeddings := own.get("embed_tokens.weight")) is not None:
            head.embeddings = nn.Parameter(embeddings.to(device, dtype))
        head.base_ids.copy_(checkpoint.base_ids)
        head.requires_grad_(False)
        return head

    def tensors(self) -> dict[str, Tensor]:
        """Return what `of` reads: the weights by the names of the published layout, and d2t and t2d."""
        shapes = self.shape.tensors
        found: dict[str, Tensor] = {}
        for parameter, names in _PARTS.items():
            parts = getattr(self, parameter).detach().split([shapes[name][0] for name in names])
            found |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
        if self.embeddings is not None:
            found["embed_tokens.weight"] = self.embeddings.detach()
        ids = self.base_ids.cpu()
        found["d2t"] = ids - torch.arange(len(ids))
        found["t2d"] = torch.zeros(self.shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        return found

    @property
    def geometry(self) -> LayerGeometry:
        """What its keys and values take of the pools: all of a sequence is seen, as they are computed."""
        shape = self.shape
        return LayerGeometry(shape.num_kv_heads, shape.head_size, shape.head_size, 0, self.fc.dtype, ())

    @property
    def scaling(self) -> float:
        """Of attention's scores."""
        return float(self.shape.head_size**-0.5)

    def rotary(self, num_positions: int) -> Rotary:
        """Return how queries and keys are turned at so many positions; tables are float32."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig.from_dict(self.shape.rotary | {"head_dim": self.shape.head_size})
        device = self.fc.device
        rotary, like = LlamaRotaryEmbedding(config).to(device), torch.zeros((), device=device)
        cos, sin = rotary(like, torch.arange(num_positions, device=device)[None])
        half = self.shape.head_size // 2
        return Rotary(torch.cat([cos[0, :, :half], sin[0, :, :half]], 1).contiguous())

    def fuse(self, tapped: Tensor) -> Tensor:
        """tapped (n, 3 b), the outputs of the layers `shape.taps`, side by side -> (n, h)."""
        return F.linear(tapped, self.fc)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rows that stand for `hidden` of the followers (n, h), and logits of what comes after these (n, v).

        hidden (n, h): `fuse` of the base's rows, or what this returned for tokens that it has not seen. positions (n,)
        int64 of these tokens. embeddings (n, h) of their followers. `wanted` (m,): the rows that are returned, since of
        the others keys and values are enough; None: all.
        """
        both = torch.cat([self._normed(embeddings, self.input_norm), self._normed(hidden, self.hidden_norm)], -1)
        attended = attend(F.linear(both, self.qkv), positions)
        if wanted is not None:
            attended, hidden = attended[wanted], hidden[wanted]
        x = hidden + F.linear(attended, self.output)
        gate, up = F.linear(self._normed(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, self.down)
        return x, F.linear(self._normed(x, self.norm), self.lm_head)

    def likeliest(self, logits: Tensor) -> Tensor:
        """logits (n, v) -> (n,) int64: the base's ids of the likeliest tokens."""
        return self.base_ids[logits.argmax(-1)]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.shape.eps).to(x.dtype)


_PARTS: dict[str, tuple[str, ...]] = {
    "fc": ("fc.weight",),
    "hidden_norm": ("midlayer.hidden_norm.weight",),
    "input_norm": ("midlayer.input_layernorm.weight",),
    "qkv": tuple(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"),
    "output": ("midlayer.self_attn.o_proj.weight",),
    "mlp_norm": ("midlayer.post_attention_layernorm.weight",),
    "gate_up": ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
    "down": ("midlayer.mlp.down_proj.weight",),
    "norm": ("norm.weight",),
    "lm_head": ("lm_head.weight",),
}  # a parameter's rows, by the names of the published layout
