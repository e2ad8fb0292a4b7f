"""What a rolling update asks of two admin doors, and for which reasons a new generation is not taken."""

import dataclasses

import pytest

from bireme.errors import UnavailableError
from bireme.launch import rolling_update
from bireme.launch.rolling_update import NotTakenError, RollingUpdate, UpdatePlan

FAST = UpdatePlan(mirror_url="http://new:9000", min_compared=20, pause_s=0, ready_limit_s=0, mirror_limit_s=0,
                  drain_limit_s=0)  # fmt: skip


def summary(**changes):
    counts = dict.fromkeys(("same", "different", "sampled", "failed", "old_failed", "dropped", "left_out"), 0)
    times = {"count": 20, "old": {"p50": 50, "p90": 100}, "new": {"p50": 50, "p90": 120}}
    found = {"examples": [], "ttft_ms": times, "latency_ms": times, **counts, "same": 20} | changes
    return {"compared": found["same"] + found["different"]} | found


class FakeDoor:
    """A launch's, by what it was asked for."""

    def __init__(self, name, asked, generation, **facts):
        self.address, self._asked = name, asked
        self.facts = {
            "status": "ready", "generation": generation, "elsewhere": {}, "requests": {"served": 0, "failed": 0},
            "workers": {"decode": {"state": "ready"}}, "safe_to_delete": True, "reasons": [], "mirror": None,
        } | facts  # fmt: skip
        self.later = []  # what changes with each look
        self.is_there = True

    def status(self):
        if not self.is_there:
            raise UnavailableError(f"{self.address}: no admin door answers there")
        self.facts |= self.later.pop(0) if self.later else {}
        return self.facts

    def post(self, path, **fields):
        self.status()
        self._asked.append((self.address, path, fields))
        return {}


@pytest.fixture
def asked():
    return []


@pytest.fixture
def old(asked):
    return FakeDoor("old", asked, 1, mirror=summary())


@pytest.fixture
def new(asked):
    return FakeDoor("new", asked, 2)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(rolling_update, "_LOOK_S", 0)


def run(old, new, plan=FAST):
    return RollingUpdate(old, new, plan, lambda _: None).run()


def test_where_the_launches_share_workers_weights_move_requests_before_the_old_one_drains(old, new, asked):
    old.facts["elsewhere"] = {"2": 1}
    result = run(old, new)
    copies = {"url": "http://new:9000", "share": 0.2, "key_file": "", "generation": 2}
    assert asked == [
        ("new", "/drain", {}), ("new", "/weight", {"weight": 0.0}), ("old", "/mirror", copies), ("new", "/undrain", {}),
        *(("new", "/weight", {"weight": weight}) for weight in (0.1, 0.5, 1.0)),
        ("old", "/mirror", {"url": None}), ("old", "/drain", {}),
    ]  # fmt: skip
    assert (result["taken"], result["by"], result["is_old_safe"]) == (True, "weights", True)


def test_where_they_share_none_the_new_entry_opens_before_the_old_one_closes(old, new, asked):
    assert run(old, new)["by"] == "entries"
    paths = [(door, path) for door, path, _ in asked]
    assert paths.index(("new", "/undrain")) < paths.index(("old", "/drain"))
    assert next(fields for _, path, fields in asked if path == "/mirror")["generation"] is None


def test_an_older_generation_gets_no_weight_beside_a_newer_one(old, new):
    old.facts |= {"generation": 3, "elsewhere": {"2": 1}}
    assert run(old, new)["by"] == "entries"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (summary(same=10), "only 10 of 20 answers could be compared within 0 s"),
        (
            summary(different=1, examples=[{"request_id": "r1", "path": "/v1/completions", "reason": "text"}]),
            r"answers differently: 1 of 21 answers, such as request r1 \(/v1/completions: text\)",
        ),
        (summary(failed=1), "1 of 21 copies failed at the new generation"),
        (
            summary(ttft_ms={"count": 20, "old": {"p90": 100}, "new": {"p90": 210}}),
            "first tokens come later: p90 210 ms, of the old one 100 ms",
        ),
        (
            summary(ttft_ms={"count": 0}, latency_ms={"count": 20, "old": {"p90": 100}, "new": {"p90": 210}}),
            "answers come later: p90 210 ms",
        ),
    ],
)
def test_what_is_found_with_copies_decides(old, new, asked, found, reason):
    old.facts["mirror"] = found
    with pytest.raises(NotTakenError, match=reason):
        run(old, new)
    assert ("new", "/undrain", {}) not in asked


def test_a_bound_is_as_wide_as_the_plan_says(old, new):
    old.facts["mirror"] = summary(different=2, failed=2)
    plan = UpdatePlan(mirror_url="http://new:9000", min_compared=20, max_different=0.1, max_failed=0.1, pause_s=0)
    assert run(old, new, plan)["taken"]


def test_requests_that_fail_there_after_it_was_let_in_are_seen(old, new):
    new.facts["requests"] = {"served": 100, "failed": 5}  # of its life before
    new.later = [{}] * 5 + [{"requests": {"served": 109, "failed": 6}}]
    with pytest.raises(NotTakenError, match="1 of 10 requests have failed at the new generation"):
        run(old, new)


def test_an_engine_that_ends_meanwhile_is_seen(old, new):
    new.later = [{}] * 5 + [{"workers": {"decode": {"state": "engine is down"}}}]
    with pytest.raises(NotTakenError, match="no longer ready: decode: engine is down"):
        run(old, new)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"workers": {"decode": {"state": "starting"}}}, "was not ready within 0 s: decode: starting"),
        ({"workers": {}}, "it has no workers yet"),
        ({"status": "not_ready"}, "not_ready"),
    ],
)
def test_one_that_is_not_ready_in_time_is_not_taken(old, new, facts, reason):
    new.facts |= facts
    with pytest.raises(NotTakenError, match=reason):
        run(old, new)


def test_a_door_that_never_answers_is_named(old, new):
    new.is_there = False
    with pytest.raises(NotTakenError, match="within 0 s: new: no admin door answers there"):
        run(old, new)


def test_an_old_one_that_is_still_at_work_is_told(old, new):
    old.facts |= {"safe_to_delete": False, "reasons": ["3 requests are under way"]}
    assert run(old, new)["left"] == ["3 requests are under way"]


def test_the_way_back_opens_the_old_one_first_and_goes_on_past_a_door_that_is_gone(old, new, asked):
    new.is_there = False
    problems = RollingUpdate(old, new, FAST, lambda _: None).go_back()
    assert asked == [("old", "/undrain", {}), ("old", "/mirror", {"url": None})]
    assert len(problems) == 2 and "/weight at new: new: no admin door answers there" in problems[0]


def test_the_new_one_is_closed_only_when_the_old_one_is_ready_again(old, new, asked):
    seen, post = [], new.post
    new.post = lambda path, **fields: (seen.append(old.facts["status"]), post(path, **fields))
    old.later = [{"status": "draining"}, {"status": "not_ready"}, {"status": "ready"}]
    patient = dataclasses.replace(FAST, ready_limit_s=60)
    assert RollingUpdate(old, new, patient, lambda _: None).go_back() == [] and seen == ["ready", "ready"]
    old.facts["status"] = "not_ready"
    told = RollingUpdate(old, new, FAST, lambda _: None).go_back()
    assert told == ["/undrain at old: it is not_ready"] and asked[-1][0] == "old"
