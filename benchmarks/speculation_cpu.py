"""Drafts on a CPU: SmolLM2-135M-Instruct with and without, in turns, on what copies or edits, and on text.

An engine with drafts and one without answer each prompt in turns, greedy, in this order and the other. Told are tokens
a step, tokens/s by the clock and by CPU, and how often drafts were right. The answers must be the same. `predicted` is
`edit` with the text that is to be edited as a predicted output, too. Told are decode steps, of each prompt the median
of its rounds, and CPU seconds of whole requests beside.

    python benchmarks/speculation_cpu.py                    # minutes; fetches the model on first use
    python benchmarks/speculation_cpu.py --model models/tiny-chat --dtype float32   # asked for what it was trained on
    python benchmarks/speculation_cpu.py --model models/tiny-chat --dtype float32 --kind Eagle3 \
        --drafter models/tiny-chat/eagle3    # a head; and the model as its own draft model, which never pays:
    python benchmarks/speculation_cpu.py --model models/tiny-chat --dtype float32 --kind DraftTarget \
        --drafter models/tiny-chat
    python benchmarks/speculation_cpu.py --dtype float32 --batch 4
    python benchmarks/speculation_cpu.py --quick            # to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bireme.engines.stub.environment import OPENMP  # noqa: E402

os.environ |= OPENMP  # before torch, as an engine process has it
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bireme.config import EngineConfig, KvCacheConfig, Limits, QuantConfig  # noqa: E402
from bireme.engines.base import EngineContext  # noqa: E402
from bireme.engines.child.validate import Gate  # noqa: E402
from bireme.engines.torch.loading import LoadedEngine  # noqa: E402
from bireme.gguf.folder import model_folder  # noqa: E402
from bireme.messages import EngineRequest, SamplingParams  # noqa: E402
from bireme.metrics import Registry  # noqa: E402
from bireme.settings import SpeculativeConfig  # noqa: E402
from models.training.chat_world import examples  # noqa: E402
from tools.real_model import chat_model  # noqa: E402

AIM_TOKENS, AIM_SPEED = 2.5, 0.97  # tokens a step where an answer copies; speed with drafts over without, anywhere
PASSAGES = (
    "The town library opened in 1911 in a brick building beside the river. Its first librarian, Anna Keller, bought"
    " four hundred books from a ship's captain who was moving inland, and lent them out for a penny a week. During the"
    " flood of 1924 the readers carried every book to the upper floor, and not one of them was lost.",
    "def total_price(items, tax_rate):\n    total = 0\n    for item in items:\n        price = item['price']\n"
    "        quantity = item['quantity']\n        total = total + price * quantity\n    tax = total * tax_rate\n"
    "    return total + tax\n\n\ndef print_receipt(items, tax_rate):\n    for item in items:\n"
    "        print(item['name'], item['price'], item['quantity'])\n    print('Total:', total_price(items, tax_rate))",
    "Dear Ms. Alvarez, thank you for your order of twelve oak chairs. The chairs left our workshop on Tuesday and will"
    " reach your restaurant in Lisbon within nine working days. If a chair arrives damaged, please send us a photograph"
    " and we will replace the chair at no cost. We enclose the invoice and wish you a busy season.",
)
COPIES = [f"Repeat this text exactly, word for word, and write nothing else:\n\n{passage}" for passage in PASSAGES]
CHANGES = (("Anna Keller", "Maria Stone"), ("quantity", "amount"), ("Lisbon", "Madrid"))
TEXTS = [
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain how a bicycle stays upright when it moves.",
    "What are the main differences between a frog and a toad?",
    "Give me a recipe for a vegetable soup, step by step.",
]


class Prompt(NamedTuple):
    messages: list[dict[str, str]]
    prediction: str = ""  # what the answer may hold


def asked(text: str, prediction: str = "") -> Prompt:
    return Prompt([{"role": "user", "content": text}], prediction)


def smollm2_sets() -> dict[str, list[Prompt]]:
    edits = [
        (f'Rewrite this text, but change "{old}" to "{new}". Keep every other word.\n\n{passage}', passage)
        for passage, (old, new) in zip(PASSAGES, CHANGES, strict=True)
    ]
    return {
        "copy": [asked(text) for text in COPIES],
        "edit": [asked(text) for text, _ in edits],
        "predicted": [asked(text, passage) for text, passage in edits],
        "text": [asked(text) for text in TEXTS],
    }


def tiny_chat_sets() -> dict[str, list[Prompt]]:
    """A copy is an answer asked for again, an edit the count after one more or less: its prompts know no other."""
    copies, edits, predicted = [], [], []
    for first in range(11, 80, 6):
        count = ", ".join(map(str, range(first, first + 12)))
        turn = [
            {"role": "user", "content": f"Count from {first} to {first + 11}."},
            {"role": "assistant", "content": count},
        ]
        other = f"Count from {first + 2} to {first + 13}."
        copies.append(Prompt([*turn, turn[0]]))
        edits.append(Prompt([*turn, {"role": "user", "content": other}]))
        predicted.append(asked(other, count))
    stories = [Prompt(task.messages) for task in examples(3, 12, True, ("story",))]
    return {"copy": copies, "edit": edits, "predicted": predicted, "text": stories}


SETS = ("copy", "edit", "predicted", "text")


class Run:
    """What one pass over a set of prompts took and made."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.num_steps = self.num_tokens = self.drafted = self.accepted = 0
        self.wall_s = self.cpu_s = 0.0  # of decode steps
        self.whole_cpu_s = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file or a model folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--kind", default="NGram", choices=("NGram", "Eagle3", "DraftTarget"), help="decoding_type")
    parser.add_argument("--drafter", default="", help="speculative_model")
    parser.add_argument("--dtype", default="bfloat16", help="auto: a GGUF file's blocks as they are; else dequantized")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at the most")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--draft", type=int, default=8, help="max_draft_len")
    parser.add_argument("--ngram", type=int, default=3, help="max_matching_ngram_size")
    parser.add_argument("--newest", action="store_true", help="is_use_oldest: false")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens = 1, 24
    torch.set_num_threads(options.threads)
    engines, tokenizer = load(options)
    is_tiny = options.model is not None and options.model.name == "tiny-chat"
    sets = tiny_chat_sets() if is_tiny else smollm2_sets()
    rows = [
        measure(engines, tokenizer, name, prompts, options) for name, prompts in sets.items() if name in options.sets
    ]
    for row in rows:
        if row["name"] != "text" and options.kind == "NGram":
            told, is_reached = f"{row['tokens_a_step']:.2f}", row["tokens_a_step"] >= AIM_TOKENS
            print(f"aim: {row['name']}: tokens a step {told}, {AIM_TOKENS:g} asked for: {word(is_reached)}")
        print(f"aim: {row['name']}: the same tokens as without: {word(row['same'])}")
        for of, key in (("decode steps", "speed_by_cpu"), ("whole requests", "whole_by_cpu")):
            told = f"{row[key]:.2f} x the tokens a CPU second of without"
            print(f"aim: {row['name']}: {of}: {told}, {AIM_SPEED:g} asked for: {word(row[key] >= AIM_SPEED)}")
    print(json.dumps({"benchmark": "speculation_cpu", "options": vars(options), "rows": rows}, default=str))


def load(options: argparse.Namespace) -> tuple[dict[bool, LoadedEngine], Any]:
    """Return the engine that drafts and the one that does not."""
    from transformers import AutoTokenizer

    folder = model_folder(options.model or chat_model())
    drafts = SpeculativeConfig(
        decoding_type=options.kind,
        max_draft_len=options.draft,
        max_matching_ngram_size=options.ngram,
        is_use_oldest=not options.newest,
        speculative_model=options.drafter or None,
    )
    engines = {}
    for has_drafts in (True, False):
        config = EngineConfig(
            dtype=options.dtype,
            quant_config=QuantConfig(quant_algo=None if options.dtype == "auto" else "NO_QUANT"),
            max_batch_size=max(8, options.batch),
            speculative_config=drafts if has_drafts else None,
            kv_cache_config=KvCacheConfig(max_tokens=1024 * max(8, options.batch), enable_block_reuse=False),
        )
        context = EngineContext(
            "decode", "decode", str(folder), config, Registry("decode"), num_threads=options.threads
        )
        engines[has_drafts] = LoadedEngine(context, lambda action: action())
    return engines, AutoTokenizer.from_pretrained(folder)


def measure(
    engines: dict[bool, LoadedEngine], tokenizer: Any, name: str, prompts: list[Prompt], options: Any
) -> dict[str, Any]:
    ids = [requested(tokenizer, prompt, options.tokens) for prompt in prompts]
    parts = [ids[begin : begin + options.batch] for begin in range(0, len(ids), options.batch)]
    answer(engines[False], parts[0])  # what the first steps prepare counts for neither
    answer(engines[True], parts[0])
    runs: dict[bool, list[list[Run]]] = {has: [[] for _ in parts] for has in (True, False)}
    for number in range(options.rounds):
        for at, part in enumerate(parts):
            for has_drafts in (True, False) if (number + at) % 2 else (False, True):
                runs[has_drafts][at].append(answer(engines[has_drafts], part))
    made = sum(of_part[0].num_tokens for of_part in runs[False])
    clock = {has: made / sum(median(run.wall_s for run in one) for one in kind) for has, kind in runs.items()}
    cpu = {has: made / sum(median(run.cpu_s for run in one) for one in kind) for has, kind in runs.items()}
    whole = {has: made / sum(median(run.whole_cpu_s for run in one) for one in kind) for has, kind in runs.items()}
    drafted = [run for one in runs[True] for run in one]
    row = {
        "name": name,
        "tokens_a_step": sum(run.num_tokens for run in drafted) / sum(run.num_steps for run in drafted),
        "tokens_per_s": clock[True],
        "without_per_s": clock[False],
        "speed": clock[True] / clock[False],
        "speed_by_cpu": cpu[True] / cpu[False],
        "whole_by_cpu": whole[True] / whole[False],
        "accepted": sum(run.accepted for run in drafted) / max(1, sum(run.drafted for run in drafted)),
        "drafted": sum(run.drafted for run in drafted) // options.rounds,
        "same": all(
            len({str(run.tokens) for kind in runs.values() for run in kind[at]}) == 1 for at in range(len(parts))
        ),
    }
    print(
        f"{name}: {row['tokens_a_step']:.2f} tokens a step, {row['tokens_per_s']:.1f} tokens/s with drafts and"
        f" {row['without_per_s']:.1f} without: {row['speed']:.2f} x by the clock, {row['speed_by_cpu']:.2f} x by CPU"
        f" (whole requests {row['whole_by_cpu']:.2f});"
        f" {row['accepted']:.0%} of {row['drafted']} drafted tokens right; load {os.getloadavg()[0]:.1f}"
    )
    print(f"  {tokenizer.decode(drafted[0].tokens[0])[:160]!r}")
    return row


def requested(tokenizer: Any, prompt: Prompt, max_tokens: int) -> EngineRequest:
    made = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
    predicted = tokenizer(prompt.prediction, add_special_tokens=False)["input_ids"] if prompt.prediction else []
    return EngineRequest(
        prompt=np.array(made["input_ids"], "<i4").tobytes(),
        prediction=np.array(predicted, "<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def answer(loaded: LoadedEngine, requests: Sequence[EngineRequest]) -> Run:
    """Answer these at once; decode steps alone are counted."""
    core, gate, run = loaded.core, Gate("decode", loaded.capacity, Limits(), b""), Run()
    answers: dict[tuple[int, int], list[int]] = {}
    began = time.process_time()
    for number, one in enumerate(requests):
        answers[1, number + 1] = []
        core.requests.add(loaded.admission.admit((1, number + 1), gate.admit(one)))
    while any(sequence.num_pending > 1 or not sequence.first_token_at for sequence in core.requests.running.values()):
        core.step()
        take(core, answers, Run())
    wall, cpu = time.perf_counter(), time.process_time()
    while core.requests.running:
        core.step()
        run.num_tokens += take(core, answers, run)
        run.num_steps += 1
    run.wall_s = time.perf_counter() - wall
    run.cpu_s = time.process_time() - cpu
    run.whole_cpu_s = time.process_time() - began
    run.tokens = list(answers.values())
    return run


def take(core: Any, answers: dict[tuple[int, int], list[int]], run: Run) -> int:
    outputs, plain = core.take_outputs()
    count = len(plain.keys)
    for key, token in zip(plain.keys, plain.tokens, strict=True):
        answers[key].append(token)
    for output in outputs:
        answers[output.key] += output.tokens
        count += len(output.tokens)
        if output.finish is not None:
            assert not output.finish.error, output.finish.error
            run.drafted += output.finish.usage.drafted_tokens
            run.accepted += output.finish.usage.accepted_tokens
    return count


def word(is_reached: bool) -> str:
    return "ok" if is_reached else "MISSED"


if __name__ == "__main__":
    main()
