"""Make a small language model with random weights, for tests and first steps: seconds, no network.

The folder is a real Hugging Face one (config, safetensors, byte-level BPE tokenizer trained on Python's
standard library, chat template, generation_config with eos). The head is not tied to the embeddings and
the weights are wide, so that greedy output has many distinct tokens; it is gibberish all the same.
A folder that is already complete is left alone; one is never left half written.

    python tools/make_sample_model.py                            # models/tiny-llama
    python tools/make_sample_model.py --arch qwen3 gemma3        # models/tiny-qwen3, models/tiny-gemma3
    python tools/make_sample_model.py --hidden 768 --layers 12 --vocab 32000 --dtype bfloat16 --out /tmp/m125

Needs torch and transformers (the extra `torch`); so `from make_sample_model import make` works in tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("llama", "qwen3", "gemma3")
STAMP = "sample_model.json"  # written last; says how the folder was made
VERSION = 1  # of what this program makes: a folder of another version is made again
CORPUS_BYTES = 4 << 20
BOS, EOS, PAD = "<s>", "<|im_end|>", "<pad>"
SPECIAL = (PAD, BOS, "</s>", "<|im_start|>", EOS, "<image>", "<tool_call>", "</tool_call>", "<think>", "</think>")

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'developer', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a sample model; the defaults give about 6 MB."""

    arch: str = "llama"
    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 4096  # at most: the tokenizer may find fewer merges
    max_position: int = 8192
    sliding_window: int = 32  # gemma3: of two layers in three
    dtype: str = "float32"
    seed: int = 0
    initializer_range: float | None = None  # None: 1.7 / sqrt(hidden), so that activations neither vanish nor repeat


class SampleModelError(Exception):
    """The model can't be made; the text says why and what to do."""


def make(path: str | Path, arch: str = "llama", *, force: bool = False, quiet: bool = True, **sizes: Any) -> Path:
    """Make the model at `path` and return it; a complete one of the same shape is left alone.

    `sizes` are fields of Shape. Raises SampleModelError; then nothing at `path` has changed.
    """
    path, shape = Path(path), Shape(arch=arch, **sizes)
    _check(shape)
    if not force and _is_made(path, shape):
        _say(quiet, f"{path} is complete; --force makes it again")
        return path
    began = time.monotonic()
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.mkdir(parents=True)
        _write(aside, shape, quiet)
        _put(aside, path)
    except OSError as error:
        raise SampleModelError(f"can't write {path}: {error.strerror or error}; check free space and rights") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size = sum(file.stat().st_size for file in path.iterdir())
    _say(quiet, f"{path}: {size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s")
    return path


def _check(shape: Shape) -> None:
    if shape.arch not in ARCHITECTURES:
        raise SampleModelError(f"arch: {shape.arch}; one of {', '.join(ARCHITECTURES)}")
    if shape.heads % shape.kv_heads:
        raise SampleModelError(f"heads: {shape.heads} is not a multiple of kv_heads {shape.kv_heads}")
    if shape.vocab < 512:
        raise SampleModelError(f"vocab: {shape.vocab}; at least 512, for 256 bytes and the special tokens")


def _is_made(path: Path, shape: Shape) -> bool:
    """Is the folder there, complete and of this shape? Raises if it holds something that we did not make."""
    try:
        stamp = json.loads((path / STAMP).read_text())
    except FileNotFoundError:
        if path.exists() and any(path.iterdir()):
            raise SampleModelError(
                f"{path} exists and is not a sample model; choose another --out or --force"
            ) from None
        return False
    except ValueError:
        return False
    return bool(stamp == _stamp(shape))


def _stamp(shape: Shape) -> dict[str, Any]:
    return {"version": VERSION, **dataclasses.asdict(shape)}


def _write(folder: Path, shape: Shape, quiet: bool) -> None:
    """Fill `folder`, the stamp last."""
    _say(quiet, "importing torch and transformers")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SampleModelError(f"{error.name} is not installed; run pip install -e .[torch]") from error
    transformers.utils.logging.disable_progress_bar()
    _say(quiet, f"training a tokenizer, {shape.vocab} tokens at most")
    tokenizer = _tokenizer(shape)
    _say(quiet, f"making {shape.arch}, {shape.layers} layers of {shape.hidden}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = _model(shape, tokenizer).to(getattr(torch, shape.dtype))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which a server under another user can't read
    (folder / STAMP).write_text(json.dumps(_stamp(shape), indent=2) + "\n")


def _put(aside: Path, path: Path) -> None:
    """Rename `aside` to `path`; what was there goes once the new folder stands."""
    old = aside.with_suffix(".old")
    if path.exists():
        path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        if not (path / STAMP).exists():  # someone else may have made the same folder meanwhile
            raise
    shutil.rmtree(old, ignore_errors=True)


def _tokenizer(shape: Shape) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_corpus(), trainer)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, inner.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=shape.max_position,
        chat_template=CHAT_TEMPLATE,
    )


def _corpus() -> Iterator[str]:
    """Yield the standard library's sources: real text that every machine has."""
    taken = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        yield text
        taken += len(text)
        if taken > CORPUS_BYTES:
            return


def _model(shape: Shape, tokenizer: Any) -> Any:
    import transformers as hf

    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "initializer_range": shape.initializer_range or 1.7 / shape.hidden**0.5,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if shape.arch == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common))
    if shape.arch == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**common))
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(shape.layers)]
    config = hf.Gemma3TextConfig(
        **common,
        layer_types=kinds,
        sliding_window=shape.sliding_window,
        query_pre_attn_scalar=shape.head_dim,
    )
    return hf.Gemma3ForCausalLM(config)


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["llama"], choices=ARCHITECTURES)
    parser.add_argument("--out", type=Path, help="folder; default models/tiny-<arch>")
    parser.add_argument("--force", action="store_true", help="make it again even if it is complete")
    for field in dataclasses.fields(Shape):
        if field.name == "arch":
            continue
        kind = {"dtype": str, "initializer_range": float}.get(field.name, int)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return parser.parse_args()


def main() -> int:
    options = vars(_arguments())
    archs, out, force = options.pop("arch"), options.pop("out"), options.pop("force")
    if out and len(archs) > 1:
        print("--out names one folder; give one --arch with it", file=sys.stderr)
        return 2
    try:
        for arch in archs:
            make(out or CHECKOUT / "models" / f"tiny-{arch}", arch, force=force, quiet=False, **options)
    except SampleModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
