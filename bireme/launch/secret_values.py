"""What of a configuration may be shown: a value that may be a secret is left out, by its name or by its looks.

Of environment variables only those of known names are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bireme.launch.yaml_source import Keys

_SECRET_WORDS = frozenset("secret secrets password passwd passphrase pwd credential credentials authorization".split())
_SECRET_WORDS_OF_TEXT = _SECRET_WORDS | frozenset(
    "key keys apikey token auth bearer cookie cookies header headers signature".split()
)
_SECRET_LOOKS = re.compile(
    r"://[^/\s]*@"  # user:password@host
    r"|[?&;][\w.-]*(?:key|token|secret|sig|signature|password|credential|auth)[\w.-]*="
    r"|-----BEGIN|\bBearer\s|\bBasic\s"
    r"|\b(?:sk|hf|ghp|gho|glpat|nvapi|xox[a-z]|pk|rk)[-_][\w-]{8,}|\bAKIA[A-Z\d]{12,}|\beyJ[\w-]{8,}\.",
    re.IGNORECASE,
)
_SHOWN_VARIABLES = re.compile(
    r"(BIREME|CUDA|NVIDIA|NCCL|UCX|NIXL|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|ATEN|TORCH|PYTORCH|TRANSFORMERS|HF"
    r"|TOKENIZERS|TLLM|TRT|TRTLLM|TENSORRT|TRITON|OTEL|NUMBA|MALLOC|XDG)_\w+|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
)
MERGED = "BIREME_OVERRIDE"  # its values stand in the recipe


def may_be_secret(keys: Keys, value: Any) -> bool:
    """Return whether a value, or anything in it, could be a secret, where `keys` lead to it."""
    return any(_is_suspect(path, scalar) for path, scalar in _scalars(keys, value))


def leave_out(tree: Mapping[str, Any], shown: frozenset[Keys] = frozenset(), above: Keys = ()) -> dict[str, Any]:
    """Copy a tree without what may be a secret, but with the values at `shown`."""
    found = {}
    for name, value in tree.items():
        keys = (*above, str(name))
        if isinstance(value, Mapping):
            found[name] = shown_variables(value) if name == "env" else leave_out(value, shown, keys)
        elif keys in shown or not may_be_secret(keys, value):
            found[name] = value
    return found


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if _SHOWN_VARIABLES.fullmatch(name) and name != MERGED and not may_be_secret((name,), value)
    }


def _scalars(keys: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _scalars((*keys, str(name)), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _scalars(keys, inner)
    else:
        yield keys, value


def _is_suspect(keys: Keys, value: Any) -> bool:
    if value is None or value == "" or isinstance(value, bool):
        return False
    words = {word.lower() for key in keys for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)}
    if not isinstance(value, str):
        return bool(words & _SECRET_WORDS)
    return bool(words & _SECRET_WORDS_OF_TEXT) or _SECRET_LOOKS.search(value) is not None
