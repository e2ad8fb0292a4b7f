"""A GGUF file's tokenizer, as the files that a model folder has: tokenizer.json and what stands around it.

`tokenizer.ggml.model` is gpt2 (byte-level BPE, `tokenizer.ggml.pre` says how texts are cut before) or llama
(SentencePiece's BPE: merges follow from the pieces' scores). Kinds are llama.cpp's (src/llama-vocab.cpp), expressions
as the models' own tokenizers have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bireme.errors import ConfigError
from bireme.gguf.head import GgufHead

_CONTROL, _USER_DEFINED = 3, 4  # llama.h's enum llama_token_type
_MAX_TOKEN_CHARACTERS = 1 << 10
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_GEMMAS = ("gemma", "gemma2", "gemma3")
_TEMPLATE = "tokenizer.chat_template"
# What ends a turn, where the file marks it as a control token but names another as eos.
_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<EOT>")
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _SUFFIXES + "|" + _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _SUFFIXES + "|" + _WORDS + r"|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _PATHS
_GPT4O = "|".join(f"{cased}{_SUFFIXES}?" for cased in _CASED) + r"|\p{N}{1,3}" + _PATHS
_EXPRESSIONS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3, "pixtral": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "tekken": _TEKKEN, "gpt-4o": _GPT4O,
}  # fmt: skip
_WITH_DIGITS_APART = ("smollm", "starcoder", "refact")
_PLAIN = ("gpt-2", "gpt2", "phi-2")
# A text that is a piece of the vocabulary is that token, whatever merges say; they begin with bos unless the file
# says otherwise.
_WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")


def text_files(head: GgufHead, vocab_size: int) -> dict[str, str]:
    """Return what a model folder says of texts, by file name. Raises ConfigError.

    `vocab_size`: tokens that the model has; a file may have fewer.
    """
    tokens = head.strings("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= vocab_size:
        raise head.wrong("tokenizer.ggml.tokens", f"the model has {vocab_size} tokens")
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_CHARACTERS:
        raise head.wrong("tokenizer.ggml.tokens", f"one has {longest} characters, at most {_MAX_TOKEN_CHARACTERS}")
    named = {role: tokens[id] for role, id in _special_ids(head, len(tokens)).items()}
    inner = _tokenizer(head, tokens, named)
    ends = sorted(_end_ids(head, tokens))
    files = {
        "tokenizer.json": inner.to_str(),
        "tokenizer_config.json": json.dumps(named | {"tokenizer_class": "TokenizersBackend"}, indent=1),
        "generation_config.json": json.dumps({"eos_token_id": ends}),
    }
    return files | _templates(head)


def _tokenizer(head: GgufHead, tokens: list[str], named: Mapping[str, str]) -> tokenizers.Tokenizer:
    kind = head.text("tokenizer.ggml.model")
    if kind not in _MAKERS:
        raise head.wrong("tokenizer.ggml.model", f"{' and '.join(_MAKERS)} are read")
    if kind == "llama" and head.architecture in _GEMMAS:
        # Gemma's file has runs of spaces as they are, its tokenizer with the mark of SentencePiece.
        tokens = ["▁" * len(text) if text and not text.strip(" ") else text for text in tokens]
    inner, adds_bos = _MAKERS[kind](head, tokens, named)
    inner.add_tokens(_added(head, tokens, set(named.values())))  # in the vocabulary already: each keeps its id
    _add_ends(inner, *_ends(head, adds_bos, named, inner))
    return inner


def _add_ends(inner: tokenizers.Tokenizer, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """Have each text begin and end with these tokens."""
    if before or after:
        single = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        pair = [*single, *(f"{text}:1" for text, _ in before), "$B:1", *(f"{text}:1" for text, _ in after)]
        tokens = list({*before, *after})
        inner.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _added(head: GgufHead, tokens: Sequence[str], named: Set[str]) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is cut."""
    types = _types(head, len(tokens))
    return [
        AddedToken(text, normalized=False, special=text in named or kind == _CONTROL)
        for text, kind in zip(tokens, types, strict=True)
        if text and (text in named or kind in (_CONTROL, _USER_DEFINED))
    ]


def _types(head: GgufHead, num_tokens: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    return head.numbers(key, num_tokens) if key in head.metadata else [0] * num_tokens


def _ends(
    head: GgufHead, adds_bos: bool, named: Mapping[str, str], inner: tokenizers.Tokenizer
) -> list[list[tuple[str, int]]]:
    """Return the tokens that each text begins with, and those that it ends with."""
    found: list[list[tuple[str, int]]] = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        text = named.get(f"{name}_token")
        token = inner.token_to_id(text) if text and head.flag(f"tokenizer.ggml.add_{name}_token", default) else None
        found.append([(str(text), token)] if token is not None else [])
    return found


def _byte_level(head: GgufHead, tokens: Sequence[str], named: Mapping[str, str]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = head.text("tokenizer.ggml.pre", "")
    vocab = _vocabulary(tokens)
    merges = []
    for merge in head.strings("tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator or left not in vocab or right not in vocab or left + right not in vocab:
            raise head.wrong("tokenizer.ggml.merges", f"{merge[:40]!r} is none of two of its tokens to a third")
        merges.append((left, right))
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_PIECES))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _EXPRESSIONS)
    if pre in _EXPRESSIONS:
        cut = pre_tokenizers.Split(Regex(_EXPRESSIONS[pre]), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    elif pre in _WITH_DIGITS_APART:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in _PLAIN:
        inner.pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted((*_EXPRESSIONS, *_WITH_DIGITS_APART, *_PLAIN)))
        raise ConfigError(
            f"{head.name}: tokenizer.ggml.pre: {pre[:40]!r} is not read (read are {known}); take the model as"
            " safetensors, or name another folder's tokenizer in `tokenizer` of a recipe"
        )
    inner.decoder = decoders.ByteLevel()
    return inner, pre in _WHOLE_PIECES


def _sentence_piece(
    head: GgufHead, tokens: Sequence[str], named: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, bool]:
    vocab, is_gemma = _vocabulary(tokens), head.architecture in _GEMMAS
    # Gemma's scores do not say in which order it merges; the order of its tokens does.
    scores = [-id for id in range(len(tokens))] if is_gemma else head.numbers("tokenizer.ggml.scores", len(tokens))
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(_merges(vocab, scores)),
            unk_token=named.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    has_prefix = not is_gemma and head.flag("tokenizer.ggml.add_space_prefix", True)
    if is_gemma:
        inner.normalizer = normalizers.Replace(" ", "▁")
        inner.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif head.architecture == "phi3":
        before = [normalizers.Prepend("▁")] if has_prefix else []
        inner.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if has_prefix else "never"
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if has_prefix else []))
    return inner, True


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield pairs of pieces in the order in which SentencePiece joins them: those to the piece of highest score first;
    to the same score, the shortest left one first.
    """
    found = []
    for piece, token in vocab.items():
        for at in range(1, len(piece)):
            left, right = vocab.get(piece[:at]), vocab.get(piece[at:])
            if left is not None and right is not None:
                found.append((-scores[token], at, len(piece) - at, token, left, right))
    texts = list(vocab)
    by_id = dict(zip(vocab.values(), texts, strict=True))
    for *_, left, right in sorted(found):
        yield by_id[left], by_id[right]


_Maker = Callable[[GgufHead, Sequence[str], Mapping[str, str]], tuple[tokenizers.Tokenizer, bool]]
_MAKERS: dict[str, _Maker] = {"gpt2": _byte_level, "llama": _sentence_piece}


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Return ids by text; of equal ones the first."""
    vocab: dict[str, int] = {}
    for token, text in enumerate(tokens):
        vocab.setdefault(text, token)
    return vocab


def _special_ids(head: GgufHead, num_tokens: int) -> dict[str, int]:
    return {
        role: head.integer(key, highest=num_tokens - 1)
        for role, name in _SPECIAL.items()
        if (key := f"tokenizer.ggml.{name}_token_id") in head.metadata
    }


def _end_ids(head: GgufHead, tokens: Sequence[str]) -> set[int]:
    """Return the tokens that end an answer: eos, the end of a turn or message, and what is one by its text."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {head.integer(key, highest=len(tokens) - 1) for key in keys if key in head.metadata}
    types = _types(head, len(tokens))
    return found | {id for id, text in enumerate(tokens) if types[id] == _CONTROL and text in _ENDS}


def _templates(head: GgufHead) -> dict[str, str]:
    found = {"chat_template.jinja": head.text(_TEMPLATE)} if _TEMPLATE in head.metadata else {}
    for key in head.metadata:
        name = key.removeprefix(f"{_TEMPLATE}.")
        if name != key and re.fullmatch(r"\w{1,64}", name):
            found[f"additional_chat_templates/{name}.jinja"] = head.text(key)
    return found
