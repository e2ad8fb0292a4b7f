"""Reads what the docs and docker/ tell users to run, and holds it against one list of rules.

An example is a `docker run` line with an image, or a service of a compose file, which is put into the same words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bireme.config import CHECKOUT

_COMMAND = re.compile(r"docker run (?:[^`\n\\]|\\\n)*")
_ALONE = frozenset("--rm --read-only --privileged --init -d -i -t -it -dit".split())  # options without a value
_SHORT = {"-p": "--publish", "-v": "--volume", "-e": "--env", "-w": "--workdir", "--net": "--network"}
_NAMESPACES = ("--network", "--pid", "--ipc", "--uts", "--userns", "--cgroupns")
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$")
_LOOPBACK = re.compile(r"(127\.0\.0\.1|\[::1\]):")


@dataclass(frozen=True)
class Example:
    """A container that a user is told to start."""

    where: str
    options: tuple[tuple[str, str], ...]  # (long name, value)
    image: str
    command: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        return self.image.startswith("bireme")

    def values(self, name: str) -> list[str]:
        """Return each value that an option is given."""
        return [value for option, value in self.options if option == name]


def examples_of(file: Path) -> list[Example]:
    """Return the examples of a page, a Dockerfile's head or a compose file."""
    text = file.read_text(encoding="utf-8")
    found = [] if not file.suffix == ".yaml" else list(_services(file, text))
    plain = re.sub(r"(?m)^# ?", "", text)
    lines = [shlex.split(line.replace("\\\n", " "), comments=True) for line in _COMMAND.findall(plain)]
    return found + [one for words in lines if "..." not in words and (one := _of_words(file.name, words[2:]))]


def broken_rules(example: Example) -> list[str]:
    """Return the rules that an example breaks, as sentences."""
    return [rule for rule, holds in RULES.items() if not holds(example)]


def files_with_examples() -> list[Path]:
    """Return every file in which a user finds containers to start."""
    folders = {"docker": ("Dockerfile*", "*.sh", "*.yaml"), "docs": ("*.md",), "recipes": ("*/README.md",)}
    found = [path for folder, patterns in folders.items() for one in patterns for path in (CHECKOUT / folder).glob(one)]
    return sorted([CHECKOUT / "README.md", *found])


def _of_words(where: str, words: list[str]) -> Example | None:
    """Return the example of the words after `docker run`; None: an option is mentioned, and there is no image."""
    options, left = [], list(words)
    while left and left[0].startswith("-"):
        name, has_value, value = left.pop(0).partition("=")
        if not has_value and name not in _ALONE:
            value = left.pop(0) if left else ""
        options.append((_SHORT.get(name, name), value))
    return Example(where, tuple(options), left[0], tuple(left[1:])) if left else None


def _services(file: Path, text: str) -> Iterator[Example]:
    below = file.with_name("compose.yaml")  # every other file is given after it
    base = yaml.safe_load(below.read_text(encoding="utf-8"))["services"] if below != file and below.exists() else {}
    for name, over in yaml.safe_load(text).get("services", {}).items():
        service = base.get(name, {}) | over  # of lists that both have, the later counts here
        image = service.get("image", name)
        options = tuple(_of_service(service))
        yield Example(f"{file.name}: {name}", options, image, tuple(service.get("command", ())))


def _of_service(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a service's keys as the options of `docker run` that they stand for."""
    lists = {"ports": "--publish", "volumes": "--volume", "cap_add": "--cap-add", "cap_drop": "--cap-drop",
             "security_opt": "--security-opt", "devices": "--device", "tmpfs": "--tmpfs"}  # fmt: skip
    words = {"network_mode": "--network", "pid": "--pid", "ipc": "--ipc", "uts": "--uts", "shm_size": "--shm-size"}
    for key, option in lists.items():
        yield from ((option, value) for value in service.get(key, ()))
    yield from ((option, service[key]) for key, option in words.items() if key in service)
    yield from ((option, "") for key, option in (("privileged", "--privileged"), ("read_only", "--read-only"))
                if service.get(key))  # fmt: skip
    yield from (("--env", f"{name}={value}") for name, value in service.get("environment", {}).items())
    if "deploy" in service:
        yield "--gpus", "all"


def _publishes_here_or_asks_for_keys(example: Example) -> bool:
    return "--api-keys" in example.command or all(map(_LOOPBACK.match, example.values("--publish")))


def _keeps_triton_s_ports_here(example: Example) -> bool:
    ports = [value for value in example.values("--publish") if re.search(r":800\d$", value)]
    return all(map(_LOOPBACK.match, ports))


def _has_namespaces_of_its_own(example: Example) -> bool:
    return not any(value == "host" for name in _NAMESPACES for value in example.values(name))


def _takes_no_more_rights(example: Example) -> bool:
    names = {name for name, _ in example.options}
    loosened = [value for value in example.values("--security-opt") if not value.startswith("no-new-privileges")]
    sockets = [value for value in example.values("--volume") if "docker.sock" in value]
    return not names & {"--privileged", "--cap-add", "--device"} and not loosened and not sockets


def _gives_rights_up(example: Example) -> bool:
    no_new = any(value.startswith("no-new-privileges") for value in example.values("--security-opt"))
    return not example.is_ours or ("ALL" in example.values("--cap-drop") and no_new)


def _says_how_large_shm_is(example: Example) -> bool:
    return not example.is_ours or bool(example.values("--shm-size"))


def _has_secrets_in_files(example: Example) -> bool:
    given = [value.partition("=")[0] for value in example.values("--env")]
    return not any(map(_SECRET.search, given))


def _can_not_write_its_root(example: Example) -> bool:
    names = {name for name, _ in example.options}
    return not example.is_ours or "--gpus" in names or {"--read-only", "--tmpfs"} <= names


RULES: dict[str, Callable[[Example], bool]] = {
    "published on this machine alone, unless --api-keys": _publishes_here_or_asks_for_keys,
    "no port of Triton's for other machines, keys or none": _keeps_triton_s_ports_here,
    "no namespace of the host's": _has_namespaces_of_its_own,
    "no right beyond Docker's default": _takes_no_more_rights,
    "bireme: no capability and none to come": _gives_rights_up,
    "bireme: the size of /dev/shm": _says_how_large_shm_is,
    "secrets in files, not in the environment": _has_secrets_in_files,
    "bireme on CPUs: a root that can't be written": _can_not_write_its_root,
}
