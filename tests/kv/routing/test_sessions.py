"""Sessions and the workers that they stay with."""

from collections import Counter

from bireme.kv.routing.sessions import SessionTable

WORKERS = [f"decode_{at}" for at in range(8)]


def test_a_session_stays_with_its_worker():
    table = SessionTable(10.0, 100)
    first = table.worker("a", "decode", WORKERS, 0.0)
    assert {table.worker("a", "decode", [*WORKERS, f"new_{at}"], 1.0) for at in range(20)} == {first}


def test_routers_that_never_talk_choose_the_same_worker():
    chosen = {SessionTable(10.0, 100).worker("a", "decode", order, 0.0) for order in (WORKERS, WORKERS[::-1])}
    assert len(chosen) == 1


def test_sessions_spread_over_all_workers():
    table = SessionTable(10.0, 10_000)
    counts = Counter(table.worker(f"s{at}", "decode", WORKERS, 0.0) for at in range(4000))
    assert min(counts.values()) > 400


def test_a_session_whose_worker_is_gone_moves_and_stays_there():
    table = SessionTable(10.0, 100)
    first = table.worker("a", "decode", WORKERS, 0.0)
    second = table.worker("a", "decode", [name for name in WORKERS if name != first], 1.0)
    assert second != first
    assert table.worker("a", "decode", WORKERS, 2.0) == second


def test_a_silent_session_is_forgotten_and_each_request_prolongs_it():
    table = SessionTable(10.0, 100)
    for now in (0.0, 8.0, 16.0):
        table.worker("a", "decode", WORKERS, now)
    assert len(table) == 1
    table.worker("b", "decode", WORKERS, 27.0)
    assert len(table) == 1


def test_the_table_has_a_bound():
    table = SessionTable(10.0, 3)
    for at in range(9):
        table.worker(f"s{at}", "decode", WORKERS, float(at) / 10)
    assert len(table) == 3
