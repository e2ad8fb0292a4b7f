"""Each commit says one thing."""

from __future__ import annotations

import subprocess

import pytest

from tests.repository.house import CHECKOUT

HOOK = CHECKOUT / "tools" / "hooks" / "commit-msg"
SINCE = "20ded8d33b553320de654935438a721382682be6"  # the last one before there was a rule


# Hundreds of processes would take seconds: the hook is read into a subshell for each message.
EACH = 'hook=$1; shift; for message; do (set -- "$message"; . "$hook"); done'


def refusal(subjects, folder):
    messages = [folder / f"{number}" for number in range(len(subjects))]
    for message, subject in zip(messages, subjects, strict=True):
        message.write_text(f"{subject}\n\nReasons; as many as there are.\n")
    command = ["sh", "-c", EACH, "sh", str(HOOK), *map(str, messages)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


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
    assert reason in refusal([subject], tmp_path)


def test_git_does_not_commit_what_is_refused(tmp_path):
    for subject, code in (("leases end", 1), ("kv: leases end", 0)):
        (tmp_path / "message").write_text(f"{subject}\n")
        assert subprocess.run(["sh", str(HOOK), tmp_path / "message"], capture_output=True).returncode == code


def test_a_subject_that_says_one_thing_is_taken(tmp_path):
    subjects = (f"kv: {'a' * 96}", "engines, kv: leases end with their engine", 'Revert "leases end; or not"')
    assert refusal(subjects, tmp_path) == ""


def git(*arguments):
    done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def test_commits_since_there_is_a_rule_keep_it(tmp_path):
    """Of a shallow clone those that are there, where it does not reach back so far."""
    if not git("cat-file", "-t", SINCE) and git("rev-parse", "--is-shallow-repository") != "true":
        pytest.skip("no history here that reaches back so far")
    commits = f"{SINCE}..HEAD" if git("cat-file", "-t", SINCE) else "HEAD"
    subjects = git("log", "--no-merges", "--format=%s", commits).splitlines()
    assert subjects and refusal(subjects, tmp_path) == ""
