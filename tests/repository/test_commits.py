"""Each commit says one thing."""

from __future__ import annotations

import subprocess

import pytest

from tests.repository.house import CHECKOUT

HOOK = CHECKOUT / "tools" / "hooks" / "commit-msg"
SINCE = "c6ddc415304ba5e6f0142659900578ee64d6437c"  # the last one before there was a rule


def refusal(subject, folder):
    message = folder / "message"
    message.write_text(f"{subject}\n\nReasons; as many as there are.\n")
    return subprocess.run(["sh", str(HOOK), str(message)], capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        (f"kv: {'a' * 97}", "101 characters; 100 at most"),
        ("kv: leases end; so do claims", "make two commits"),
        ("leases end", "no area"),
        (": leases end", "no area"),
    ],
)
def test_a_subject_that_says_too_much_or_not_what_is_refused(subject, reason, tmp_path):
    assert reason in refusal(subject, tmp_path)


def test_a_subject_that_says_one_thing_is_taken(tmp_path):
    for subject in (f"kv: {'a' * 96}", "engines, kv: leases end with their engine", 'Revert "leases end; or not"'):
        assert refusal(subject, tmp_path) == ""


def test_commits_since_there_is_a_rule_keep_it(tmp_path):
    log = ["git", "-C", str(CHECKOUT), "log", "--no-merges", "--format=%s", f"{SINCE}..HEAD"]
    done = subprocess.run(log, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no history here that reaches back so far")
    assert [found for subject in done.stdout.splitlines() if (found := refusal(subject, tmp_path))] == []
