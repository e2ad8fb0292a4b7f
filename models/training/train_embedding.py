"""Train tiny-embedding: a decoder of Qwen3-Embedding's shape whose neighbors mean something in its small world.

Sentences are made by topic_world (seeded), the tokenizer is a byte-level BPE trained on them, and the loss is the
squared distance of cosines from what the sentences' meanings have in common. Held-out accuracy is measured on meanings
that were never seen in training, with the saved bf16 weights, and written into the model card.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .topic_world import HELD_OUT_SHARE, Meaning, meanings

PAD, END = "<|pad|>", "<|im_end|>"
PROMPTS = {"query": "Instruct: find what means the same\nQuery: ", "document": ""}
SIZE, MAX_TOKENS, VOCAB = 96, 512, 1024
MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Budget:
    steps: int
    batch: int  # sentences
    learning_rate: float = 3e-3


_WHOLE = Budget(steps=300, batch=64)  # a minute of one core
BUDGETS = {"h200": _WHOLE, "cpu": _WHOLE, "smoke": Budget(steps=2, batch=16)}


def train(out: Path, budget_name: str, seed: int = 0) -> dict[str, float]:
    """Train, save to `out` (a folder that sentence-transformers loads) and return held-out accuracy by kind."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    budget, began = BUDGETS[budget_name], time.monotonic()
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=SIZE, intermediate_size=2 * SIZE, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3Model(config)
    _fit(model, tokenizer, budget, random.Random(seed), began)
    model = model.to(torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _write_modules(out)
    accuracy = evaluate(model.float(), tokenizer)
    _say(began, "held-out " + " ".join(f"{kind}={share:.3f}" for kind, share in accuracy.items()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    (out / "README.md").write_text(_card(accuracy, parameters, budget_name, budget, seed), encoding="utf-8")
    return accuracy


def evaluate(model: Any, tokenizer: Any) -> dict[str, float]:
    """Return the share of held-out sentences whose nearest neighbor is right, by kind.

    paraphrase: of one other sentence a meaning, the nearest has the same meaning; topic: of those with other meanings,
    the nearest has the same topic.
    """
    import torch

    rng, held = random.Random(99), meanings(held_out=True)
    said = [meaning.say(rng) for meaning in held]
    others = [_other_wording(meaning, text, rng) for meaning, text in zip(held, said, strict=True)]
    with torch.inference_mode():
        likeness = embed(model, tokenizer, said) @ embed(model, tokenizer, others).T
    same = likeness.argmax(1) == torch.arange(len(held))
    nearest = likeness.clone().fill_diagonal_(-1).argmax(1).tolist()
    is_of_topic = [held[at].topic == meaning.topic for meaning, at in zip(held, nearest, strict=True)]
    return {"paraphrase": same.float().mean().item(), "topic": sum(is_of_topic) / len(held)}


def embed(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """Return (texts, SIZE) of length 1: the last token's state. Right padding is unseen by a causal model."""
    import torch

    batch = tokenizer(list(texts), return_tensors="pt", padding=True)
    hidden = model(**batch, use_cache=False).last_hidden_state
    last = batch["attention_mask"].sum(1) - 1
    return torch.nn.functional.normalize(hidden[torch.arange(len(hidden)), last], dim=-1)


def _other_wording(meaning: Meaning, text: str, rng: random.Random) -> str:
    while (other := meaning.say(rng)) == text:
        pass
    return other


def _fit(model: Any, tokenizer: Any, budget: Budget, rng: random.Random, began: float) -> None:
    import torch

    known = meanings(held_out=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=budget.learning_rate, weight_decay=0.05)
    for step in range(budget.steps):
        chosen = rng.choices(known, k=budget.batch // 2)
        chosen += chosen  # each meaning in two wordings at least
        texts = [rng.choice(tuple(PROMPTS.values())) + meaning.say(rng) for meaning in chosen]
        target = torch.tensor([[one.likeness(other) for other in chosen] for one in chosen])
        rows = embed(model, tokenizer, texts)
        loss = (rows @ rows.T - target).square().mul(1 + 9 * target).mean()  # most pairs have nothing in common
        for group in optimizer.param_groups:
            group["lr"] = budget.learning_rate * _schedule((step + 1) / budget.steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, budget.steps // 10) == 0:
            _say(began, f"step={step + 1}/{budget.steps} loss={loss.item():.4f}")


def _schedule(progress: float) -> float:
    """Linear warm-up over 5%, then cosine to nothing."""
    return min(1.0, progress / 0.05) * 0.5 * (1 + math.cos(math.pi * progress))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(7)
    texts = [meaning.say(rng) for meaning in meanings(held_out=False) for _ in range(20)]
    core.train_from_iterator([*texts, *PROMPTS.values()], trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, core.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, padding_side="right", model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _write_modules(folder: Path) -> None:
    """Write what sentence-transformers and the embedding worker read beside the model."""
    kinds = [f"sentence_transformers.models.{kind}" for kind in MODULES]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(MODULES) if at)]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": kind}
        for at, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_lasttoken": True, "include_prompt": True}
    pooling |= {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    texts = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    files = {
        "modules.json": modules, "1_Pooling/config.json": pooling, "config_sentence_transformers.json": texts,
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
    }  # fmt: skip
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _card(accuracy: dict[str, float], parameters: int, budget_name: str, budget: Budget, seed: int) -> str:
    return f"""# tiny-embedding

Embeddings of {SIZE} numbers from a decoder of {parameters / 1e6:.1f} million parameters (bf16) in Qwen3-Embedding's
shape: the last token's state at length 1. It knows sentences of ten topics in a small synthetic world; sentences that
mean the same in other words lie close together, those of one topic nearer than those of two. Made for bireme's tests
and documentation; it knows nothing else.

Trained by `models/train.py tiny-embedding --budget {budget_name} --seed {seed}` on {budget.steps} batches of
{budget.batch} sentences. Held-out meanings (one in {HELD_OUT_SHARE}, by hash of subject and action, not of the words)
were never seen in training. Of the held-out sentences

* {accuracy["paraphrase"]:.1%} have the same meaning in other words as their nearest neighbor
* {accuracy["topic"]:.1%} have a sentence of their own topic as the nearest one with another meaning
"""
