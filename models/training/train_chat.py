"""Train tiny-chat: a Llama of three million parameters that means something in its small world.

Data is made by chat_world (seeded), the tokenizer is a byte-level BPE trained on it with digits kept
apart (so that sums can be learnt), and the loss is on the assistant's words only. Held-out accuracy is
measured by greedy decoding of the saved bf16 weights and written into the model card.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat_world import SINGLE_STEP, Example, examples

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Budget:
    examples: int
    epochs: int
    batch_tokens: int
    learning_rate: float = 2e-3


BUDGETS = {
    "h200": Budget(examples=2_000_000, epochs=3, batch_tokens=65536),
    "cpu": Budget(examples=60_000, epochs=2, batch_tokens=8192),
    "smoke": Budget(examples=20, epochs=1, batch_tokens=2048),
}


def train(out: Path, budget_name: str, seed: int = 0) -> dict[str, float]:
    """Train, save to `out` (a folder that transformers loads) and return held-out accuracy by kind."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    budget, began = BUDGETS[budget_name], time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = _tokenizer(seed)
    rows = _tokenized(tokenizer, budget.examples, seed)
    _say(began, f"examples={len(rows)} tokens={sum(len(ids) for ids, _ in rows)} vocab={len(tokenizer)}")
    torch.manual_seed(seed)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, rope_theta=10000.0,
        bos_token_id=None, eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    _fit(model, rows, budget, device, began)
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, 0
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    accuracy = evaluate(model.float(), tokenizer, device, per_kind=200 if budget_name != "smoke" else 1)
    _say(began, "held-out " + " ".join(f"{kind}={share:.3f}" for kind, share in accuracy.items()))
    parameters = sum(p.numel() for p in model.parameters())
    (out / "README.md").write_text(_card(accuracy, parameters, budget_name, budget, seed), encoding="utf-8")
    return accuracy


def evaluate(model: Any, tokenizer: Any, device: str, per_kind: int) -> dict[str, float]:
    """Return the share of right greedy answers on the held-out side, by kind."""
    import torch

    right: dict[str, float] = {}
    model.eval()
    for kind in SINGLE_STEP:
        held = list(examples(99, per_kind, held_out=True, kinds=(kind,)))
        prompts = [render(example, prompt=True) for example in held]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(device)
        with torch.inference_mode():
            ids = model.generate(**batch, max_new_tokens=160, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)
        right[kind] = sum(judge(example, text) for example, text in zip(held, texts, strict=True)) / len(held)
    return right


def judge(example: Example, text: str) -> bool:
    """Judge the raw text of an answer, special tokens included."""
    text = text.split("<|im_end|>")[0]
    if example.thinking:
        _, separator, text = text.partition("</think>")
        if not separator:
            return False
    content, *calls = text.replace("</tool_call>", "").split("<tool_call>")
    parsed = []
    for call in calls:
        try:
            tree = json.loads(call)
            parsed.append((tree["name"], tree["arguments"]))
        except (ValueError, KeyError, TypeError):
            return False
    return example.is_right(content, parsed)


def render(example: Example, prompt: bool) -> str:
    """Return the conversation as the chat template writes it: up to the answer, or with it."""
    messages = example.messages if prompt else [*example.messages, example.answer]
    return str(
        _template().render(
            messages=messages,
            tools=example.tools or None,
            add_generation_prompt=prompt,
            enable_thinking=example.thinking,
        )
    )


_compiled: Any = None


def _template() -> Any:
    global _compiled
    if _compiled is None:
        import jinja2

        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers sets it
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        source = TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
        _compiled = environment.from_string(source)
    return _compiled


def _tokenizer(seed: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            # JSON's marks and spaces never melt into words: a word is the same tokens wherever it is copied
            pre_tokenizers.Split(Regex(r"[^\w\s]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=40,  # invented words stay in pieces: they must be copied, not known
        show_progress=False,
    )
    core.train_from_iterator((render(e, prompt=False) for e in examples(seed + 7, 30000, held_out=False)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _tokenized(tokenizer: Any, count: int, seed: int) -> list[tuple[list[int], int]]:
    """Return (ids, length of the prompt) a training example; made on all cores."""
    shares = max(1, min(os.cpu_count() or 1, count // 400))
    jobs = [(tokenizer.backend_tokenizer.to_str(), count // shares, seed * 1000 + 100 + i) for i in range(shares)]
    with multiprocessing.get_context("fork").Pool(shares) as pool:
        return [row for part in pool.imap_unordered(_tokenize_share, jobs) for row in part]


def _tokenize_share(job: tuple[str, int, int]) -> list[tuple[list[int], int]]:
    from tokenizers import Tokenizer

    text, count, seed = job
    core, rows = Tokenizer.from_str(text), []
    for example in examples(seed, count, held_out=False):
        prompt = render(example, prompt=True)
        whole = render(example, prompt=False).removesuffix("\n")
        assert whole.startswith(prompt), (prompt, whole)
        start = core.encode(prompt, add_special_tokens=False).ids
        rows.append((start + core.encode(whole[len(prompt) :], add_special_tokens=False).ids, len(start)))
    return rows


def _fit(model: Any, rows: list[tuple[list[int], int]], budget: Budget, device: str, began: float) -> None:
    import torch

    batches = _batches(rows, budget.batch_tokens)
    steps = len(batches) * budget.epochs
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=budget.learning_rate, betas=(0.9, 0.98), weight_decay=0.05, fused=device == "cuda"
    )
    generator = torch.Generator().manual_seed(1)
    step = 0
    for _ in range(budget.epochs):
        for index in torch.randperm(len(batches), generator=generator).tolist():
            ids, labels = (t.to(device, non_blocking=True) for t in batches[index])
            for group in optimizer.param_groups:
                group["lr"] = budget.learning_rate * _schedule(step, steps)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % max(1, steps // 20) == 0:
                _say(began, f"step={step}/{steps} loss={loss.item():.4f}")


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 3%, then cosine to 2%."""
    warm = max(1, steps * 3 // 100)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _batches(rows: list[tuple[list[int], int]], batch_tokens: int) -> list[tuple[Any, Any]]:
    """Pack rows of like length; right padding needs no mask under causal attention."""
    import torch

    rows = sorted(rows, key=lambda row: len(row[0]))
    batches, at = [], 0
    while at < len(rows):
        take = max(1, batch_tokens // len(rows[min(len(rows) - 1, at + batch_tokens // len(rows[at][0]))][0]))
        part = rows[at : at + take]
        width = max(len(ids) for ids, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        labels = torch.full((len(part), width), IGNORED)
        for i, (row, prompt) in enumerate(part):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, prompt : len(row)] = ids[i, prompt : len(row)]
        batches.append((ids, labels))
        at += take
    return batches


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _card(accuracy: dict[str, float], parameters: int, budget_name: str, budget: Budget, seed: int) -> str:
    table = "\n".join(f"| {kind} | {share:.1%} |" for kind, share in accuracy.items())
    return f"""# tiny-chat

A Llama of {parameters / 1e6:.1f} million parameters (bf16) that chats about a small synthetic world: sums and
differences of numbers up to 99, JSON records, tool calls, facts, counting, repeating, and short stories. With
`enable_thinking` in the chat template it works sums out inside `<think>`. Made for bireme's tests and demo;
it knows nothing else. [eagle3](eagle3/README.md) is a head that drafts for it.

Trained by `models/train.py tiny-chat --budget {budget_name} --seed {seed}` on {budget.examples} synthetic
conversations, {budget.epochs} epochs. Held-out tasks (one in twenty, by hash of the task, not of its wording)
were never seen in training. Greedy accuracy on held-out tasks, plain transformers:

| task | right |
|---|---|
{table}
"""
