"""Write docs/models.md: which model classes the torch engine serves, in which forms, and what proves each.

    python tools/make_models_page.py             write it
    python tools/make_models_page.py --check     exit with 1 when the file is not what would be written

Classes, decoders, methods of quantization and GGUF architectures are the engine's own tables. A class without its case
in the test that proves it fails, as does a test that is not there.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.engines.torch.weights.architectures import FAMILIES, PROVED, PROVED_WITH_PICTURES
from bireme.gguf.architectures import architectures as gguf_classes
from bireme.launch.footprint.families import FAMILIES as COUNTED

PAGE = CHECKOUT / "docs" / "models.md"
TESTS = "tests/engines/torch/"
MODELS = TESTS + "tiny_models.py"  # has the test's cases
TEXT = TESTS + "test_architectures.py::test_a_tiny_model_equals_generate"
SEES = TESTS + "test_pictures.py::test_output_equals_generate"
MEMORY = (
    "tests/launch/footprint/test_decoder_shape.py"
    "::test_a_class_is_counted_to_the_last_parameter_and_attends_as_the_probe_sees"
)
OTHER_ORDER = {"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"}
FORMS = {  # what a form of the tables is proved by
    "fused, on a GPU": TESTS + "test_fused_decoder.py",
    "packed, on a CPU": TESTS + "test_packed_decoder.py",
    "apart, after migration, reuse and preemption": TESTS + "test_equality_of_families.py",
    "quantized": TESTS + "test_quantized.py::test_every_method_is_in_a_layout",
    "quantized by the methods' own libraries": TESTS
    + "test_quantized_libraries.py::test_weights_and_tokens_are_those_of_transformers_own_dequantized_model",
    "experts that stay MXFP4": TESTS + "test_kept_experts.py",
    "partly quantized": TESTS
    + "test_quantized_libraries.py::test_what_a_list_leaves_plain_is_plain_beside_what_stays_as_it_is",
    "quantized, apart, after migration, reuse and preemption": TESTS + "test_equality_of_layouts.py",
    "groups of 4 bits that stay on a CPU": TESTS + "test_kept_integers.py",
    "GGUF": TESTS + "test_gguf.py",
    "memory counted before the start": MEMORY,
}
HEAD = """\
# Models

What the torch engine serves, written by `tools/make_models_page.py` from the engine's own tables. Any other class is \
refused by name. TensorRT-LLM has a list of its own.

A class is let in when the greedy output of a tiny random model equals that of transformers' `generate`, token by \
token: `{text}`, with the case named in the last column. Fused and packed are the engine's own decoders \
(`forward/decoder_weights.py`); other classes run on transformers' modules over the engine's paged KV. GGUF: such \
files of the class are read. Memory: what an engine takes is \
[counted before it starts](sizing.md#what-an-engine-takes).

## Text

| class | on a GPU | on a CPU | GGUF | memory | case |
|---|---|---|---|---|---|
"""
PICTURES = """\

## Text and pictures

Proved by `{sees}`. LLaVA wraps any language model of the table above.

| class | decoder |
|---|---|
"""
QUANTIZED = """\

## Quantized checkpoints

Each is served on GPUs and CPUs, for every class above that was trained or converted so. Forms that there are \
products with [stay as they are](tuning.md#weights-in-8-and-4-bits); all others are dequantized as they are loaded. \
Projections that a checkpoint has plain stay so beside quantized ones. Another method is refused by its name.

| quantization_config.quant_method | what it stores | written by |
|---|---|---|
"""
PROOFS = """\

## What proves it

| what | test |
|---|---|
"""


def text() -> str:
    """Return the page. Raises ValueError for a class or a form that nothing proves."""
    from bireme.engines.torch.weights.quantized.methods import METHODS

    cases, in_gguf = _cases(), set(gguf_classes())
    proofs = {"text": TEXT, "text and pictures": SEES} | FORMS
    if missing := [test for test in proofs.values() if not _exists(test)]:
        raise ValueError(f"there is no {', '.join(missing)}; see FORMS")
    if unproved := PROVED - cases.keys():
        raise ValueError(f"{MODELS} has no case for {', '.join(sorted(unproved))}")
    page = HEAD.format(text=TEXT)
    for name in sorted(PROVED):
        own = ("fused", "packed") if name in FAMILIES else ("modules", "modules")
        counted = "counted" if name in COUNTED else ""
        page += f"| {name} | {own[0]} | {own[1]} | {'read' * (name in in_gguf)} | {counted} | {cases[name]} |\n"
    page += PICTURES.format(sees=SEES)
    page += "".join(f"| {name} | modules |\n" for name in sorted(PROVED_WITH_PICTURES))
    page += QUANTIZED
    page += "".join(f"| {name} | {method.forms} | {method.written_by} |\n" for name, method in METHODS.items())
    return page + PROOFS + "".join(f"| {what} | `{test}` |\n" for what, test in proofs.items())


def _cases() -> dict[str, str]:
    """Return class -> model type, of the test's cases."""
    tree = ast.parse((CHECKOUT / MODELS).read_text(encoding="utf-8"))
    settings = {ast.unparse(node.target): node.value for node in tree.body if isinstance(node, ast.AnnAssign)}
    found = settings["SETTINGS"]
    assert isinstance(found, ast.Dict)
    types = [ast.literal_eval(key) for key in found.keys if key is not None]
    return {name: kind for kind in types for name in PROVED if _is_class_of(kind, name)}


def _is_class_of(model_type: str, name: str) -> bool:
    if model_type in OTHER_ORDER:
        return name == OTHER_ORDER[model_type]
    own = model_type.removesuffix("_text").replace("_", "")
    return name.lower().replace("_", "") in (f"{own}forcausallm", f"{own}lmheadmodel")


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = CHECKOUT / file
    return path.is_file() and (not name or name in set(_functions(path)))


def _functions(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from (node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text() == text() else 1
    PAGE.write_text(text())
    print(f"wrote {PAGE.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
