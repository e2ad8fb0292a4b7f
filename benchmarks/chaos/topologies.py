"""What a campaign serves: a recipe, how many workers of each kind, how many frontend processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A worker that is killed every few seconds would soon stay down for good, or wait ten seconds for each life: faults
# of different minutes are not counted together.
_SUPERVISOR = {"max_restarts": 20, "restart_window_s": 30}
# The engine's tokens are the text: parsers would take parts of a random answer for thoughts or calls.
_PLAIN_CHAT = {"reasoning_parser": "", "tool_parser": ""}


@dataclass(frozen=True, slots=True)
class Topology:
    name: str
    recipe: str
    model: str  # folder of the tokenizer
    served_name: str
    replicas: dict[str, int]  # worker -> how many
    frontend_processes: int = 1
    is_mocker: bool = False
    engine_config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def override(self) -> dict[str, Any]:
        """What is changed in the recipe, for --override."""
        engine = {"engine_config": self.engine_config} if self.engine_config else {}
        workers = {name: {"replicas": count, **engine} for name, count in self.replicas.items()}
        return {"workers": workers, "supervisor": _SUPERVISOR, **self.settings}

    def workers(self, kind: str) -> list[str]:
        """Return the model names of a worker's replicas: decode, decode_1, ..."""
        return [kind if number == 0 else f"{kind}_{number}" for number in range(self.replicas[kind])]


def _mocker(num_prefill: int, num_decode: int, frontend_processes: int) -> Topology:
    return Topology(
        name=f"mocker-{num_prefill}+{num_decode}",
        recipe="recipes/mocker-disagg",
        model="models/tiny-llama",
        served_name="mocker-disagg",
        replicas={"prefill": num_prefill, "decode": num_decode},
        frontend_processes=frontend_processes,
        is_mocker=True,
        # Triton's HTTP generate_stream loses tokens of quicker steps, which is not looked for here.
        engine_config={"mocker": {"step_ms": 20, "prefill_ms": 10}},
    )


def _tiny(num_prefill: int, num_decode: int, frontend_processes: int) -> Topology:
    return Topology(
        name=f"tiny-{num_prefill}+{num_decode}",
        recipe="recipes/tiny",
        model="models/tiny-chat",
        served_name="tiny-chat",
        replicas={"prefill": num_prefill, "decode": num_decode},
        frontend_processes=frontend_processes,
        settings={"chat": _PLAIN_CHAT, "router": {"transfer_ms": 0}},  # short prompts are transferred, too
    )


TOPOLOGIES = {item.name: item for item in (_mocker(1, 1, 1), _mocker(2, 2, 2), _tiny(1, 1, 1), _tiny(1, 2, 2))}
