"""What users are told to run opens no more than docs/security.md lets a container open."""

from __future__ import annotations

import pytest

from bireme.config import CHECKOUT
from tests.docker.run_examples import RULES, broken_rules, examples_of, files_with_examples
from tools import serve

EXAMPLES = [(file, one) for file in files_with_examples() for one in examples_of(file)]
GOOD = (
    "docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --shm-size=1g "
    "-p 127.0.0.1:9000:9000 bireme recipes/tiny"
)


@pytest.mark.parametrize(("file", "example"), EXAMPLES, ids=lambda value: getattr(value, "where", ""))
def test_an_example_keeps_every_rule(file, example):
    assert broken_rules(example) == [], example


def test_every_image_has_an_example_of_its_own():
    shown = {file.name for file, example in EXAMPLES if example.is_ours}
    assert {path.name for path in (CHECKOUT / "docker").glob("Dockerfile*")} <= shown
    assert {"compose.yaml", "compose.trtllm.yaml", "images.md", "trtllm.md"} <= shown


def read(tmp_path, text, name="page.md"):
    page = tmp_path / name
    page.write_text(text)
    (example,) = examples_of(page)
    return example


@pytest.mark.parametrize(
    ("kept", "broken", "rule"),
    [
        ("127.0.0.1:9000:9000", "9000:9000", "published on this machine alone, unless --api-keys"),
        ("127.0.0.1:9000:9000", "0.0.0.0:8001:8001", "no port of Triton's for other machines, keys or none"),
        ("--read-only ", "--network host --read-only ", "no namespace of the host's"),
        ("--read-only ", "--ipc=host --read-only ", "no namespace of the host's"),
        ("--read-only ", "--privileged --read-only ", "no right beyond Docker's default"),
        ("no-new-privileges", "seccomp=unconfined", "no right beyond Docker's default"),
        ("bireme", "-v /var/run/docker.sock:/var/run/docker.sock bireme", "no right beyond Docker's default"),
        ("--cap-drop ALL ", "", "bireme: no capability and none to come"),
        ("--shm-size=1g ", "", "bireme: the size of /dev/shm"),
        ("bireme", "-e HF_TOKEN bireme", "secrets in files, not in the environment"),
        ("bireme", "-e BIREME_KEY=abc bireme", "secrets in files, not in the environment"),
        ("--read-only ", "", "bireme on CPUs: a root that can't be written"),
    ],
)
def test_each_rule_finds_what_breaks_it(tmp_path, kept, broken, rule):
    assert broken_rules(read(tmp_path, GOOD)) == []
    assert rule in broken_rules(read(tmp_path, GOOD.replace(kept, broken, 1)))


def test_a_service_of_compose_is_held_against_the_same_rules(tmp_path):
    text = (
        "services: {bireme: {ports: ['9000:9000'], privileged: true, environment: {HF_TOKEN: x}, network_mode: host}}"
    )
    broken = broken_rules(read(tmp_path, text, "compose.yaml"))
    assert set(RULES) - set(broken) == {"no port of Triton's for other machines, keys or none"}


def test_lines_that_go_on_and_remarks_are_read_and_a_mention_is_no_example(tmp_path):
    text = (
        "#   docker run --rm \\\n#     -p 127.0.0.1:9000:9000 bireme  # a remark\nuse `docker run --shm-size` there\n"
    )
    assert read(tmp_path, text).values("--publish") == ["127.0.0.1:9000:9000"]


@pytest.mark.parametrize(("file", "example"), EXAMPLES, ids=lambda value: getattr(value, "where", ""))
def test_serve_takes_what_an_example_hands_it(file, example):
    if example.is_ours and not example.values("--entrypoint"):
        words = [word.removeprefix("${BIREME_RECIPE:-").removesuffix("}") for word in example.command]
        assert serve.parse(words) and all((CHECKOUT / word).exists() for word in words if word.startswith("recipes/"))
