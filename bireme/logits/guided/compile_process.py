"""The process that compiles grammars, started by compile_client.py.

Native code that never ends, takes all memory or overflows its stack costs only a process. Frames, both ways: u32
length, then
    in    JSON {"seconds": limit, "view": name, "info": its tokenizer info or null, "kind", "text", "any_whitespace"}
    out   one byte, `+` or `-`, then the compiled grammar as JSON, or the reason why there is none
An alarm ends the process a little after the limit, also when its parent is gone. torch and transformers stay out: a
start takes a fraction of the time and memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import resource
import signal
import struct
import sys
import types
from pathlib import Path
from typing import Any, BinaryIO

from bireme.guides import LOOSE
from bireme.logits.guided.schema import rewritten

logger = logging.getLogger("bireme.logits")
U32 = struct.Struct("<I")
MAX_MEMORY_BYTES = 4 << 30  # no key: while it compiles; max_compiled_bytes bounds what comes of it
_ALARM_GRACE_S = 2.0
_PARTS = ("load_binding", "compiler", "grammar", "tokenizer_info")


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # native code's prints must not get between the frames
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # the engine's steps come first
    import_lightly()
    most = _mapped_bytes() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    compiler = Compiler()
    write_frame(answers, b"+")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        request = json.loads(frame)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + _ALARM_GRACE_S)
        answer = compiler.answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, answer)
    return 0


class Compiler:
    def __init__(self) -> None:
        self._views: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> bytes:
        try:
            text: str = self._compile(request).serialize_json()
            return b"+" + text.encode()
        except MemoryError:
            return b"-it takes too much memory"
        except Exception as error:  # a grammar's mistake; xgrammar says it in several types
            return b"-" + explain(error).encode()

    def _compile(self, request: dict[str, Any]) -> Any:
        from xgrammar.compiler import GrammarCompiler

        if request["info"] is not None:
            self._views[request["view"]] = GrammarCompiler(
                _open_info(request["info"]), max_threads=1, cache_enabled=False
            )
        compiler = self._views[request["view"]]
        kind, text = request["kind"], request["text"]
        if kind in ("json", "structural_tag"):
            tree = json.loads(text)
            tree = rewrite(tree) if kind == "json" else rewrite_tag(tree, request["any_whitespace"])
            text = json.dumps(tree, ensure_ascii=False)
        if kind in ("json", "json_object"):
            return compiler.compile_json_schema(
                text or '{"type": "object"}', any_whitespace=request["any_whitespace"], strict_mode=True
            )
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(text)
        from xgrammar.grammar import Grammar

        return compiler.compile_grammar(Grammar.from_ebnf(choice_grammar(text) if kind == "choice" else text))


def rewrite(schema: Any, is_loose: bool = False, has_tags: bool = False) -> dict[str, Any]:
    try:
        made, left_out = rewritten(schema, is_loose, has_tags)
    except ValueError as error:
        if not is_loose:
            raise
        made, left_out = {"type": "object"}, [str(error)]
    for reason in left_out:
        logger.warning("guide_loosened reason=%r", reason)
    return made


def rewrite_tag(tag: Any, any_whitespace: bool) -> Any:
    """Rewrite a tag's schemas; unless it says else, one white space character parts their JSON."""
    found = [tag]
    while found:
        node = found.pop()
        if isinstance(node, list):
            found += node
        elif isinstance(node, dict) and "json_schema" in node:
            has_tags = node.get("style", "json") != "json"
            node["json_schema"] = rewrite(node["json_schema"], node.pop(LOOSE, False), has_tags)
            if not any_whitespace:
                node.setdefault("max_whitespace_cnt", 1)
        elif isinstance(node, dict):
            found += node.values()
    return tag


def choice_grammar(text: str) -> str:
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))


def explain(error: Exception) -> str:
    """Return xgrammar's message without its file names and time of day."""
    text = str(error).strip().partition("\n")[0]
    _, separator, rest = text.partition(": ")
    if separator and text.startswith("["):
        text = rest
    return text[:500] or type(error).__name__


def import_lightly() -> None:
    """Import what compiles and reads vocabularies, or all of xgrammar where a release has that elsewhere.

    Its __init__ takes 2 s of CPU, this 0.3 s; in engines, which have torch and transformers, both take as little.
    """
    try:
        _import_parts()
    except Exception as error:
        logger.warning("xgrammar_imported_whole reason=%r", error)
        for name in [one for one in sys.modules if one.partition(".")[0] in ("torch", "transformers", "xgrammar")]:
            del sys.modules[name]
        importlib.import_module("xgrammar")


def _import_parts() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails, and tvm_ffi does without
    transformers = types.ModuleType("transformers")
    transformers.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast = object  # type: ignore[attr-defined]
    sys.modules["transformers"] = transformers
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["xgrammar"] = package
    for part in _PARTS:
        importlib.import_module(f"xgrammar.{part}")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    data = stream.read(U32.unpack(head)[0])
    return data if len(data) == U32.unpack(head)[0] else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(U32.pack(len(data)) + data)
    stream.flush()


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _open_info(text: str) -> Any:
    from xgrammar.tokenizer_info import TokenizerInfo

    return TokenizerInfo.deserialize_json(text)


if __name__ == "__main__":
    sys.exit(main())
