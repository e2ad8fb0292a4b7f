"""Train tiny-chat's EAGLE-3 head: one layer that says what the frozen model would say next.

Conversations are chat_world's questions with tiny-chat's own greedy answers. As in the paper (https://arxiv.org/abs/
2503.01840, "training-time test") a few steps are made of the head's own rows in training, too: the first reads the
model's rows, each further one what the head made of the token before. The loss is the cross-entropy with the model's
own distribution over the draft vocabulary, on the answers' tokens alone.

How many tokens a step verifies is measured on held-out tasks with the saved bf16 weights: from each token on, drafts
are what the head says likeliest, and those count that the model says as well.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_world import examples
from .train_chat import render

if TYPE_CHECKING:
    from torch import Tensor

BASE = Path(__file__).resolve().parents[1] / "tiny-chat"
NUM_DRAFTS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
    "intermediate_size": 256, "draft_vocab_size": 384, "dtype": "bfloat16", "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
}  # fmt: skip
OF_BASE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
OF_BASE += ("max_position_embeddings", "rope_parameters", "attention_bias", "mlp_bias")
LATER_STEPS = 0.8  # a step's share in the loss is this of the step before


@dataclass(frozen=True, slots=True)
class Budget:
    examples: int
    epochs: int
    held_out: int
    batch: int = 32  # conversations
    learning_rate: float = 3e-3


_WHOLE = Budget(examples=3000, epochs=8, held_out=400)  # three minutes of one core that has nothing else to do
BUDGETS = {"h200": _WHOLE, "cpu": _WHOLE, "smoke": Budget(examples=48, epochs=1, held_out=16, batch=16)}


@dataclass(frozen=True, slots=True)
class Talk:
    kind: str
    ids: list[int]  # prompt, then the model's answer
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Conversations side by side, padded on the right: B of them, L tokens, and R rows from which answers are drafted.

    Row r of a conversation has what the model made of token r. With its follower, token r + 1, it says token r + 2.
    """

    talks: list[Talk]
    ids: Tensor  # (B, L) int64, zeros behind the last
    tapped: Tensor  # (B, L, 3 b) bfloat16
    batch: Tensor  # (R,) int64: the conversation of each
    places: Tensor  # (R,) int64: r
    left: Tensor  # (R,) int64: how many of the conversation's tokens follow what it says
    teacher: Tensor  # (R, v) bfloat16: the model's logits of token r + 2, in the draft vocabulary


def train(out: Path, budget_name: str, seed: int = 0) -> dict[str, float]:
    """Train, save to `out` (a head in the published layout) and return tokens a step on held-out tasks, by kind."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bireme.engines.torch.forward.eagle_head import EagleHead
    from bireme.engines.torch.weights.eagle_checkpoint import WEIGHTS, read_eagle, read_shape

    budget, began = BUDGETS[budget_name], time.monotonic()
    torch.set_num_threads(1)  # sums come in an order that depends on it
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval().requires_grad_(False)
    talks = asked(tokenizer, seed + 1, budget.examples, held_out=False)
    out.mkdir(parents=True, exist_ok=True)
    own = base.config.to_dict()
    config = CONFIG | {name: own[name] for name in OF_BASE}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    head = EagleHead(read_shape(out, base.config), torch.float32)
    _begin(head, base, _draft_vocabulary(talks, head.shape.draft_vocab_size))
    batches = answered(base, head, tokenizer, talks, budget.batch)
    num_rows, num_bytes = sum(len(rows.places) for rows in batches), sum(rows.tapped.nbytes for rows in batches)
    _say(began, f"batches={len(batches)} rows={num_rows} bytes={num_bytes >> 20} MiB")
    _fit(head, base, batches, budget, began)
    save_file({name: tensor.contiguous() for name, tensor in head.bfloat16().tensors().items()}, out / WEIGHTS)
    saved = EagleHead.of(read_eagle(out, base.config), torch.float32)
    held = asked(tokenizer, 99, budget.held_out, held_out=True)
    kept, tokens_a_step = measure(saved, base, answered(base, saved, tokenizer, held, budget.batch))
    _say(began, f"kept={kept} tokens a step " + " ".join(f"{kind}={x:.2f}" for kind, x in tokens_a_step.items()))
    sizes = sum(parameter.numel() for parameter in head.parameters()), (out / WEIGHTS).stat().st_size
    (out / "README.md").write_text(_card(kept, tokens_a_step, sizes, budget_name, budget, seed), encoding="utf-8")
    return tokens_a_step


def asked(tokenizer: Any, seed: int, count: int, held_out: bool) -> list[Talk]:
    """Return conversations of the world, with the world's own answers."""
    found = []
    for example in examples(seed, count, held_out=held_out):
        prompt, whole = render(example, prompt=True), render(example, prompt=False).removesuffix("\n")
        ids, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, whole[len(prompt) :]))
        found.append(Talk(example.kind, ids + answer, len(ids)))
    return found


def answered(base: Any, head: Any, tokenizer: Any, talks: Sequence[Talk], batch: int) -> list[Rows]:
    """Return rows of conversations that end with the model's own greedy answer.

    Most answers of the world are that, which one pass tells; the others are made anew.
    """
    found, others = [], []
    for part in _alike(talks, batch):
        rows, is_own = _rows(base, head, part)
        others += [talk for talk, own in zip(part, is_own, strict=True) if not own]
        found.append(_of_talks(rows, is_own))
    for part in _alike(others, 128):
        made = [talk for talk in _generated(base, tokenizer, part) if len(talk.ids) > talk.num_prompt + 2]
        found += [_rows(base, head, some)[0] for some in _alike(made, batch)]
    return [rows for rows in found if len(rows.places)]


def _generated(base: Any, tokenizer: Any, talks: Sequence[Talk]) -> list[Talk]:
    """Return the conversations with the model's own greedy answers."""
    import torch

    prompts = [talk.ids[: talk.num_prompt] for talk in talks]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        made = base.generate(**inputs, max_new_tokens=100, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    found, end = [], tokenizer.eos_token_id
    for talk, prompt, answer in zip(talks, prompts, made.tolist(), strict=True):
        own = answer[: answer.index(end) + 1] if end in answer else answer
        found.append(Talk(talk.kind, prompt + own, talk.num_prompt))
    return found


def _draft_vocabulary(talks: Sequence[Talk], size: int) -> list[int]:
    """Return the tokens that are said most often, in their order."""
    counts: Counter[int] = Counter()
    for talk in talks:
        counts.update(talk.ids[talk.num_prompt :])
    most = [token for token, _ in counts.most_common(size)]
    most += [token for token in range(2 * size) if token not in counts][: size - len(most)]
    return sorted(most)


def _begin(head: Any, base: Any, vocabulary: list[int]) -> None:
    """It begins with the model's own words for its tokens."""
    import torch

    head.base_ids.copy_(torch.tensor(vocabulary))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.fill_(1)
        head.output.mul_(0.5)
        head.down.mul_(0.5)
        head.norm.copy_(base.model.norm.weight / 4)
        head.lm_head.copy_(base.lm_head.weight[head.base_ids])


def _alike(talks: Sequence[Talk], size: int) -> Iterator[list[Talk]]:
    by_length = sorted(talks, key=lambda talk: len(talk.ids))
    return (by_length[at : at + size] for at in range(0, len(by_length), size))


def _rows(base: Any, head: Any, talks: list[Talk]) -> tuple[Rows, list[bool]]:
    """Return rows, and whether each conversation's answer is the model's own."""
    import torch

    longest = max(len(talk.ids) for talk in talks)
    ids = torch.zeros(len(talks), longest, dtype=torch.long)
    for row, talk in zip(ids, talks, strict=True):
        row[: len(talk.ids)] = torch.tensor(talk.ids)
    # From the prompt's last token on, which says the answer's first: the prompt's own step has made that.
    spots = [(i, place) for i, talk in enumerate(talks) for place in range(talk.num_prompt - 1, len(talk.ids) - 1)]
    batch, places = torch.tensor(spots).T
    tapped, logits = tap(base, ids, head.shape.taps, (batch, places))
    is_said = logits.argmax(-1) == ids[batch, places + 1]
    is_own = [bool(is_said[batch == i].all()) for i in range(len(talks))]
    drafted = (places[1:] > places[:-1]).nonzero()[:, 0]  # the next one is the same conversation's
    left = torch.tensor([len(talk.ids) for talk in talks])[batch] - places - 3
    teacher = logits[drafted + 1][:, head.base_ids].bfloat16()
    return Rows(talks, ids, tapped.bfloat16(), batch[drafted], places[drafted], left[drafted], teacher), is_own


def _of_talks(rows: Rows, chosen: list[bool]) -> Rows:
    import torch

    keep = torch.tensor(chosen)
    own, talks = keep[rows.batch], [talk for talk, is_in in zip(rows.talks, chosen, strict=True) if is_in]
    batch = (keep.cumsum(0) - 1)[rows.batch[own]]
    of_rows = (part[own] for part in (rows.places, rows.left, rows.teacher))
    return Rows(talks, rows.ids[keep], rows.tapped[keep], batch, *of_rows)


def tap(base: Any, ids: Tensor, taps: Sequence[int], wanted: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """ids (B, L) -> the outputs of the layers `taps`, side by side (B, L, 3 b), and (R, vocabulary) logits.

    `wanted`: whose logits, as conversations and places, (R,) each.
    """
    import torch

    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _, __, made: found.update({layer: made[0] if isinstance(made, tuple) else made})

    hooks = [base.model.layers[layer].register_forward_hook(keep(layer)) for layer in taps]
    try:
        with torch.inference_mode():
            last = base.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = base.lm_head(last[wanted])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[layer] for layer in taps], -1).clone(), logits.clone()


def _drafts(head: Any, base: Any, cos_sin: Tensor, rows: Rows, follows_own: bool) -> Iterator[Tensor]:
    """Yield the logits (R, v) of each step; further ones read what was said, or what is likeliest itself."""
    import torch

    embed, (count, length) = base.model.embed_tokens, rows.ids.shape
    attention = _Attention(head, cos_sin, rows)
    hidden = head.fuse(rows.tapped.flatten(0, 1).to(head.fc.dtype))
    positions, followers = torch.arange(length).repeat(count), rows.ids.roll(-1, 1).flatten()
    wanted = rows.batch * length + rows.places
    hidden, logits = head(embed(followers), hidden, positions, attention.first, wanted)
    yield logits
    for step in range(1, NUM_DRAFTS):
        said = rows.ids[rows.batch, (rows.places + step + 1).clamp(max=length - 1)]
        followers = head.likeliest(logits) if follows_own else said
        hidden, logits = head(embed(followers), hidden, rows.places + step, attention.later)
        yield logits


class _Attention:
    """What `EagleHead` attends with: the first step's keys of all places, then each row's own of the later steps."""

    def __init__(self, head: Any, cos_sin: Tensor, rows: Rows) -> None:
        import torch

        shape = head.shape
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._size, self._cos_sin, self._scaling = shape.head_size, cos_sin, head.scaling
        self._rows, (self._count, self._length) = rows, rows.ids.shape
        first = torch.cat([torch.ones(1, dtype=torch.bool), rows.batch[1:] != rows.batch[:-1]])
        begins = first.nonzero()[:, 0][first.cumsum(0) - 1]
        self._column = torch.arange(len(rows.batch)) - begins  # of each row beside its conversation's others
        self._hidden = torch.arange(self._length) > rows.places[:, None]  # (R, L)
        self._keys: Any = None  # of the first step, (B, H, L, K)
        self._values: Any = None
        self._own: list[tuple[Tensor, Tensor]] = []  # of each later step, (R, H, K)

    def _turned(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, as many heads of each: (rows, H, K)."""
        import torch

        query, key, value = qkv.float().view(len(qkv), -1, self._size).split(self._sizes, 1)
        cos, sin = self._cos_sin[positions].chunk(2, -1)
        cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
        query, key = (part * cos + part.roll(self._size // 2, -1) * sin for part in (query, key))
        groups = self._sizes[0] // self._sizes[1]
        return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)

    def first(self, qkv: Tensor, positions: Tensor) -> Tensor:
        import torch.nn.functional as F

        each = (part.unflatten(0, (self._count, -1)).transpose(1, 2) for part in self._turned(qkv, positions))
        query, self._keys, self._values = each
        found = F.scaled_dot_product_attention(query, self._keys, self._values, is_causal=True, scale=self._scaling)
        return found.transpose(1, 2).flatten(2).flatten(0, 1)

    def later(self, qkv: Tensor, positions: Tensor) -> Tensor:
        import torch

        query, key, value = self._turned(qkv, positions)
        self._own.append((key, value))
        beside = query.new_zeros(self._count, int(self._column.max()) + 1, *query.shape[1:])
        beside[self._rows.batch, self._column] = query
        scores = (beside.transpose(1, 2) @ self._keys.transpose(-1, -2)).transpose(1, 2)[self._rows.batch, self._column]
        scores = scores.masked_fill(self._hidden[:, None], float("-inf"))
        scores = torch.cat([scores, *((query * own).sum(-1, keepdim=True) for own, _ in self._own)], -1)
        weights = (scores * self._scaling).softmax(-1)
        shared = weights.new_zeros(*beside.shape[:3], self._length)
        shared[self._rows.batch, self._column] = weights[..., : self._length]
        found = (shared.transpose(1, 2) @ self._values).transpose(1, 2)[self._rows.batch, self._column]
        for at, (_, own) in enumerate(self._own):
            found = found + weights[..., self._length + at, None] * own
        return found.flatten(1)


def _fit(head: Any, base: Any, batches: list[Rows], budget: Budget, began: float) -> None:
    import torch

    steps, cos_sin = len(batches) * budget.epochs, head.rotary(base.config.max_position_embeddings).cos_sin
    optimizer = torch.optim.AdamW(head.parameters(), lr=budget.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, budget.learning_rate, steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(1)
    known = torch.zeros(head.shape.vocab_size, dtype=torch.bool).index_fill_(0, head.base_ids, True)
    for epoch in range(budget.epochs):
        losses = []
        for index in torch.randperm(len(batches), generator=generator).tolist():
            loss = _loss(head, base, cos_sin, batches[index], known)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        _say(began, f"epoch={epoch + 1}/{budget.epochs} loss={sum(losses) / len(losses):.4f}")


def _loss(head: Any, base: Any, cos_sin: Tensor, rows: Rows, known: Tensor) -> Tensor:
    """`known`: the vocabulary's tokens that can be drafted; others say nothing about the head."""
    import torch

    total, rest = torch.zeros(()), torch.arange(len(rows.places))
    with torch.autocast("cpu", torch.bfloat16):
        for step, logits in enumerate(_drafts(head, base, cos_sin, rows, follows_own=False)):
            # What a row says now, the row so many later said first: the model's logits are that one's.
            counts = rest[rows.left >= step]
            counts = counts[known[rows.ids[rows.batch[counts], rows.places[counts] + step + 2]]]
            teacher = rows.teacher[counts + step].float().softmax(-1)
            loss = -(teacher * logits[counts].float().log_softmax(-1)).sum(-1)
            total = total + LATER_STEPS**step * loss.sum() / max(1, len(counts))
    return total


def measure(head: Any, base: Any, batches: Sequence[Rows]) -> tuple[list[float], dict[str, float]]:
    """Return how often a draft's first, second, ... token is what the model says, where those before it are, and how
    many tokens come of a step at temperature 0, by kind and in "all"; the prompt's own step and token are left out.
    """
    import torch

    cos_sin = head.rotary(base.config.max_position_embeddings).cos_sin
    tokens: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    kept: defaultdict[int, list[bool]] = defaultdict(list)
    for rows in batches:
        with torch.inference_mode():
            drafts = [head.likeliest(logits) for logits in _drafts(head, base, cos_sin, rows, follows_own=True)]
        drafted = torch.stack(drafts, -1)
        for number, talk in enumerate(rows.talks):
            own, at, end = drafted[rows.batch == number].tolist(), talk.num_prompt, len(talk.ids) - 1
            while at < end:  # token `at` is the last one that is known
                num_right = 0
                for place, (draft, said) in enumerate(zip(own[at - talk.num_prompt], talk.ids[at + 1 :], strict=False)):
                    kept[place].append(draft == said)
                    if draft != said:
                        break
                    num_right += 1
                made = min(num_right + 1, end - at)
                at += made
                for kind in (talk.kind, "all"):
                    tokens[kind] += made
                    steps[kind] += 1
    shares = [sum(kept[place]) / max(1, len(kept[place])) for place in range(NUM_DRAFTS)]
    return shares, {kind: tokens[kind] / count for kind, count in sorted(steps.items())}


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _card(
    kept: Sequence[float], tokens_a_step: dict[str, float], sizes: tuple[int, int], name: str, budget: Budget, seed: int
) -> str:
    table = "\n".join(f"| {kind} | {count:.2f} |" for kind, count in tokens_a_step.items())
    return f"""# tiny-chat's EAGLE-3 head

A head of {sizes[0] / 1e6:.2f} million parameters (bf16, {sizes[1] / 1e6:.2f} MB) that drafts what
[tiny-chat](../README.md) says next, in the layout that SafeAILab publishes. It reads the outputs of layers 1, 3 and 5,
shares tiny-chat's embeddings, and drafts {CONFIG["draft_vocab_size"]} of its tokens. A step verifies what it drafts, so
tiny-chat's answers, and their accuracy, are those without it.

Trained by `models/train.py tiny-chat/eagle3 --budget {name} --seed {seed}` on {budget.examples} synthetic
conversations with tiny-chat's own greedy answers, {budget.epochs} epochs, {NUM_DRAFTS} steps each. Measured on
{budget.held_out} held-out tasks at temperature 0 with {NUM_DRAFTS} drafts, by the loop that verifies them: a draft's
tokens are right in {", ".join(f"{share:.1%}" for share in kept)} of the cases in which those before are. Tokens a step,
the prompt's own left out:

| task | tokens a step |
|---|---|
{table}
"""
