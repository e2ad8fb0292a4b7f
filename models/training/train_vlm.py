"""Train tiny-vlm: a LLaVA of three million parameters that names coloured shapes in small pictures.

The vision tower (CLIP) and the language model (Llama) are trained together from nothing; conversations and
pictures are made by picture_world while training runs, none twice. The loss is on the assistant's words only.
Held-out accuracy is measured by greedy decoding of the saved bf16 weights and written into the model card.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .picture_world import KINDS, Dialogue, dialogues

TEMPLATE = Path(__file__).with_name("vlm_chat_template.jinja").read_text(encoding="utf-8")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<image>")
PAD, START, END, IMAGE = range(4)
SIDE, PATCH = 96, 12  # pixels
TOKENS_PER_IMAGE = (SIDE // PATCH) ** 2
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Budget:
    steps: int
    batch: int  # dialogues
    seconds: float  # the schedule ends here at the latest
    learning_rate: float = 1.5e-3


BUDGETS = {
    "h200": Budget(steps=12_000, batch=320, seconds=290),
    "cpu": Budget(steps=6_000, batch=32, seconds=5400),
    "smoke": Budget(steps=6, batch=8, seconds=60),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Right padding needs no mask under causal attention."""

    ids: Any  # (B, T) int64
    labels: Any  # (B, T) int64
    pixels: Any  # (images, 3, SIDE, SIDE) uint8


def train(out: Path, budget_name: str, seed: int = 0) -> dict[str, float]:
    """Train, save to `out` (a folder that transformers loads) and return held-out accuracy by kind."""
    import torch

    budget, began = BUDGETS[budget_name], time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = make_tokenizer(seed)
    batches = _batches(tokenizer, budget, seed)
    next(batches)  # worker processes are forked before CUDA starts
    torch.manual_seed(seed)
    model = _model(len(tokenizer)).to(device)
    _say(began, f"parameters={sum(p.numel() for p in model.parameters())} vocab={len(tokenizer)} device={device}")
    steps = _fit(model, batches, budget, device, began)
    model = model.to(torch.bfloat16)
    save(model, tokenizer, out)
    accuracy = evaluate(model.float(), tokenizer, device, per_kind=300 if budget_name != "smoke" else 4)
    _say(began, "held-out " + " ".join(f"{kind}={share:.3f}" for kind, share in accuracy.items()))
    parameters = sum(p.numel() for p in model.parameters())
    (out / "README.md").write_text(
        _card(accuracy, parameters, budget_name, steps * budget.batch, seed), encoding="utf-8"
    )
    return accuracy


def _model(vocab_size: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=160, intermediate_size=480, num_hidden_layers=4, num_attention_heads=5, image_size=SIDE,
        patch_size=PATCH, projection_dim=160,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=TOKENS_PER_IMAGE,
        vision_feature_layer=-1, vision_feature_select_strategy="default", tie_word_embeddings=True,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def make_tokenizer(seed: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\w\s]|\s?\w+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    texts = (
        text for d in dialogues(seed + 7, 20000, held_out=False) for t in d.turns for text in (t.question, t.answer)
    )
    core.train_from_iterator(itertools.chain(texts, ["system\n", "user\n", "assistant\n"] * 50), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write model, tokenizer and processor the way transformers' Auto classes read them."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    images = CLIPImageProcessor(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(out)  # fmt: skip


def evaluate(model: Any, tokenizer: Any, device: str, per_kind: int) -> dict[str, float]:
    """Return the share of right greedy answers about held-out scenes, by kind."""
    import torch

    right: dict[str, float] = {}
    model.eval()
    for kind in KINDS:
        held = list(dialogues(99, per_kind, held_out=True, kind=kind))
        rows = [encode(tokenizer, dialogue, prompt=True)[0] for dialogue in held]
        width = max(len(row) for row in rows)
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=80, do_sample=False, **_pixels(held, device)
            )
        texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        right[kind] = sum(t.strip() == d.turns[0].answer for t, d in zip(texts, held, strict=True)) / len(held)
    return right


def _pixels(held: list[Dialogue], device: str) -> dict[str, Any]:
    import torch

    arrays = [array for dialogue in held for array in pixels(dialogue)]
    return {"pixel_values": _normalised(torch.from_numpy(np.stack(arrays)).to(device))} if arrays else {}


def encode(tokenizer: Any, dialogue: Dialogue, prompt: bool = False) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of a conversation, images expanded; with `prompt`, only up to the first answer."""
    core = tokenizer.backend_tokenizer
    ids: list[int] = []
    labels: list[int] = []
    opening = [f"<|im_start|>system\n{dialogue.system}<|im_end|>\n"] if dialogue.system else []
    for number, turn in enumerate(dialogue.turns):
        asked = turn.question
        if number == 0 and dialogue.scenes:
            asked = "".join(part if isinstance(part, str) else "<image>" for part in dialogue.parts)
        text = "".join(opening) + f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        for token in core.encode(text, add_special_tokens=False).ids:
            ids += [token] * (TOKENS_PER_IMAGE if token == IMAGE else 1)
        labels += [IGNORED] * (len(ids) - len(labels))
        if prompt:
            break
        answer = [*core.encode(turn.answer, add_special_tokens=False).ids, END]
        ids += answer
        labels += answer
        opening = ["\n"]
    return ids, labels


def pixels(dialogue: Dialogue) -> list[Any]:
    """Return each picture as the image processor scales it: (3, SIDE, SIDE) uint8."""
    from PIL import Image

    scaled = (picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for picture in dialogue.pictures())
    return [np.asarray(picture).transpose(2, 0, 1) for picture in scaled]


def _normalised(pixels_u8: Any) -> Any:
    return pixels_u8.float() / 127.5 - 1.0  # mean and std 0.5


def _batches(tokenizer: Any, budget: Budget, seed: int) -> Iterator[Batch]:
    """Yield batches for ever, made by worker processes."""
    import torch

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Batch]:
            worker = torch.utils.data.get_worker_info()
            torch.set_num_threads(1)
            for number in itertools.count():
                share = f"{seed}-{worker.id if worker else 0}-{number}"
                yield _batch(tokenizer, list(dialogues(share, budget.batch, held_out=False)))  # type: ignore[arg-type]

    cores = os.cpu_count() or 1
    workers = max(1, cores - 2) if cores > 2 else 0
    return iter(
        torch.utils.data.DataLoader(
            Stream(), batch_size=None, num_workers=workers, prefetch_factor=None if not workers else 4
        )
    )


def _batch(tokenizer: Any, made: list[Dialogue]) -> Batch:
    import torch

    rows = [encode(tokenizer, dialogue) for dialogue in made]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
    arrays = [array for dialogue in made for array in pixels(dialogue)]
    return Batch(ids, labels, torch.from_numpy(np.stack(arrays)))


def _fit(model: Any, batches: Iterator[Batch], budget: Budget, device: str, began: float) -> int:
    """Train until the steps or the seconds are used up; return the steps done."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=budget.learning_rate, betas=(0.9, 0.98), weight_decay=0.05, fused=device == "cuda"
    )
    start = time.monotonic()
    for step in range(budget.steps):
        progress = max(step / budget.steps, (time.monotonic() - start) / budget.seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = budget.learning_rate * _schedule(progress)
        batch = next(batches)
        ids, labels, images = (t.to(device, non_blocking=True) for t in (batch.ids, batch.labels, batch.pixels))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=ids, pixel_values=_normalised(images)).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, budget.steps // 60) == 0:
            _say(began, f"step={step}/{budget.steps} progress={progress:.3f} loss={loss.item():.4f}")
    return step


def _schedule(progress: float) -> float:
    """Linear warm-up over 3%, then cosine to 1%."""
    if progress < 0.03:
        return progress / 0.03 + 0.01
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97))


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _card(accuracy: dict[str, float], parameters: int, budget_name: str, num_dialogues: int, seed: int) -> str:
    table = "\n".join(f"| {kind} | {share:.1%} |" for kind, share in accuracy.items())
    size, tokens, kinds = f"{SIDE} x {SIDE}", TOKENS_PER_IMAGE, len(KINDS)
    return f"""# tiny-vlm

A LLaVA of {parameters / 1e6:.1f} million parameters (bf16): a CLIP vision tower of its own ({size} pixels,
{tokens} tokens a picture), a two-layer projector and a small Llama. It names colour, shape, count and position
of simple shapes on a light ground, one or two pictures a conversation, and a handful of facts without a picture.
Made for bireme's tests and demo; it knows nothing else.

Trained by `models/train.py tiny-vlm --budget {budget_name} --seed {seed}` on {num_dialogues} synthetic
conversations, each seen once. Held-out scenes (one in twenty, by hash of the objects, not of how they are drawn)
were never seen in training; facts are those of training. Greedy accuracy, plain transformers,
{kinds} kinds of question:

| question | right |
|---|---|
{table}
"""
