"""Print what Triton finally uses for each model, and where that differs from bireme/specs.py.

    python tools/show_config.py                         all models of the server at 127.0.0.1:8000
    python tools/show_config.py decode generate
    python tools/show_config.py --url 127.0.0.1:9000 decode_1

One line a tensor; a line that differs from the specs starts with `!` and says what they have. The last line is
one JSON document. Exit code 1 when anything differs, 2 when the server does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from bireme.config import stage_of
from bireme.specs import MODELS, ModelSpec, TensorSpec

TIMEOUT_S = 10.0


@dataclass
class Comparison:
    """A model's configuration as lines, and what differs."""

    lines: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(self, text: str, difference: str = "") -> None:
        self.lines.append(f"{'!' if difference else ' '} {text}" + (f"    <- {difference}" if difference else ""))
        if difference:
            self.differences.append(f"{text}: {difference}")


def compare(config: dict[str, Any], spec: ModelSpec | None) -> Comparison:
    """Compare Triton's configuration with a spec; without one (a declarative ensemble) only list it."""
    result = Comparison()
    is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    kind = config.get("platform") or config.get("backend") or "?"
    expected = "" if spec is None or spec.decoupled == is_decoupled else f"the spec says decoupled={spec.decoupled}"
    result.add(f"{kind}, decoupled={is_decoupled}", expected)
    size = config.get("max_batch_size", 0)
    expected = "" if spec is None or spec.max_batch_size == size else f"the spec says {spec.max_batch_size}"
    result.add(f"max_batch_size={size}", expected)
    for group in config.get("instance_group", ()):
        result.add(f"instances={group.get('count')} {group.get('kind')}")
    _compare_tensors(result, "input", config.get("input", []), spec.inputs if spec else None)
    _compare_tensors(result, "output", config.get("output", []), spec.outputs if spec else None)
    return result


def _compare_tensors(
    result: Comparison, side: str, found: list[dict[str, Any]], expected: tuple[TensorSpec, ...] | None
) -> None:
    specs = {tensor.name: describe_spec(tensor) for tensor in expected or ()}
    for tensor in found:
        text = describe_config(tensor)
        wanted = specs.pop(tensor["name"], None)
        difference = "" if expected is None or wanted == text else f"the spec says {wanted or 'no such tensor'}"
        result.add(f"{side:6} {tensor['name']:28} {text}", difference)
    for name, wanted in specs.items():
        result.add(f"{side:6} {name:28} -", f"missing; the spec says {wanted}")


def describe_config(tensor: dict[str, Any]) -> str:
    kind = tensor["data_type"].removeprefix("TYPE_")
    dims = ",".join(str(int(dim)) for dim in tensor["dims"])
    return f"{'BYTES' if kind == 'STRING' else kind}[{dims}]{' optional' if tensor.get('optional') else ''}"


def describe_spec(tensor: TensorSpec) -> str:
    return f"{tensor.data_type}[{','.join(map(str, tensor.dims))}]{' optional' if tensor.optional else ''}"


class Server:
    """The two questions that this program has."""

    def __init__(self, url: str) -> None:
        self._url = url if "://" in url else f"http://{url}"

    def config(self, model: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self._get(f"/v2/models/{model}/config"))
        return config

    def models(self) -> list[str]:
        rows = json.loads(self._get("/v2/repository/index", b"{}"))
        return sorted(row["name"] for row in rows if row.get("state") == "READY")

    def has(self, model: str) -> bool:
        try:
            self._get(f"/v2/models/{model}/ready")
        except urllib.error.HTTPError:
            return False
        return True

    def _get(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(urllib.request.Request(self._url + path, body), timeout=TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer


def known_models(server: Server) -> list[str]:
    """Return the server's ready models; those of the specs where only the launcher may ask for the list."""
    try:
        return server.models()
    except urllib.error.HTTPError:
        return [model for model in (*MODELS, "text_generation") if server.has(model)]


def show(server: Server, models: list[str]) -> dict[str, list[str]]:
    """Print each model; return the differences by model."""
    differences: dict[str, list[str]] = {}
    for model in models:
        result = compare(server.config(model), MODELS.get(stage_of(model)))
        print(model)
        print("\n".join(result.lines))
        differences[model] = result.differences
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--url", default="127.0.0.1:8000", help="the server's HTTP address (%(default)s)")
    arguments = parser.parse_args()
    server = Server(arguments.url)
    try:
        differences = show(server, arguments.models or known_models(server))
    except urllib.error.HTTPError as error:
        print(f"{error.url}: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"no tritonserver answers at {arguments.url}: {error}; give its HTTP address with --url", file=sys.stderr)
        return 2
    print(json.dumps({"differences": differences}))
    return 1 if any(differences.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
