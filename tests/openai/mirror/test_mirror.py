"""Copies of requests for another launch: which are sent, how, and what is found with their answers."""

import asyncio
import json
import socket
import threading

import pytest

from bireme.discovery import live_settings, mirror_reports
from bireme.discovery.live_settings import LiveSettings, MirrorSettings
from bireme.openai.mirror import copies, mirror
from tests.openai.certificates import write_pair
from tests.openai.mirror.other_launch import OtherLaunch


@pytest.fixture
def other():
    with OtherLaunch().listening() as running:
        yield running


@pytest.fixture
def ask(tmp_path, other):
    """Have copies made."""

    def begin(**fields):
        settings = MirrorSettings(**{"url": other.url, "share": 1.0, "run": "a"} | fields)
        live_settings.write(tmp_path, LiveSettings(mirror=settings))
        live_settings.look(tmp_path)
        return settings

    yield begin
    (tmp_path / live_settings.FILE_NAME).unlink(missing_ok=True)
    live_settings.look(tmp_path)


@pytest.fixture
async def bench(frontend, tmp_path):
    return await frontend(run_dir=tmp_path)


async def answered(bench, other=None, spoil=lambda body: body, **fields):
    """Let a chat be answered, and its copy with the same body, spoiled."""
    reply = bench.chat({"x-request-id": "one"}, **fields)
    if other is not None:
        other.answer = lambda: (200, {}, spoil(reply.data))
    await bench.workers.emit(4)
    return await reply.end()


async def found(folder, settings, **counts):
    """Return the summary once it has these counts."""
    while True:
        summary = mirror_reports.summary(folder, settings)
        if all(summary[name] >= count for name, count in counts.items()):
            return summary
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_answers_are_counted_with_their_times(bench, other, ask, tmp_path, stream):
    settings = ask()
    await answered(bench, other, temperature=0, stream=stream)
    summary = await found(tmp_path, settings, same=1)
    assert summary["statuses"] == {"old": {"200": 1}, "new": {"200": 1}} and summary["examples"] == []
    assert summary["ttft_ms"]["count"] == int(stream) and summary["latency_ms"]["old"]["p50"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_another_answer_is_told_by_the_request_s_id_and_without_its_words(bench, other, ask, tmp_path, stream):
    settings = ask()
    reply = await answered(bench, other, lambda body: body.replace(b'"content":"', b'"content":"Z'), temperature=0,
                           stream=stream)  # fmt: skip
    summary = await found(tmp_path, settings, different=1)
    (example,) = summary["examples"]
    assert (example["request_id"], example["path"]) == ("one", "/v1/chat/completions")
    assert example["reason"].startswith("choices[0].content: they differ at 0 of 4 and")
    assert reply.status == 200 and summary["compared"] == 1


async def test_what_chance_decides_is_compared_by_status_and_times_alone(bench, other, ask, tmp_path):
    settings = ask()
    await answered(bench, other, lambda body: body.replace(b'"content":"', b'"content":"Z'), temperature=1)
    summary = await found(tmp_path, settings, sampled=1)
    assert summary["compared"] == 0 and summary["latency_ms"]["count"] == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((503, {}, b"{}"), "HTTP status 503"),
        ((302, {"location": "http://169.254.169.254/"}, b""), "HTTP status 302"),
        ((200, {}, b"<html>"), "it has no end"),
        ((200, {}, b'{"choices": 7}'), "it is no answer of this API"),
        ((200, {}, b'data: {"error": {"code": "UNAVAILABLE"}}\n\n'), "its stream ended with the error UNAVAILABLE"),
        ((200, {"content-length": "99"}, b"{"), "it can't be reached, or hung up (IncompleteRead)"),
    ],
)
async def test_a_copy_without_an_answer_has_failed_and_says_why(bench, other, ask, tmp_path, answer, reason):
    settings = ask()
    other.answer = lambda: answer
    await answered(bench, temperature=0)
    assert (await found(tmp_path, settings, failed=1))["examples"][0]["reason"] == reason
    assert len(other.bodies) == 1  # a redirect is not followed


async def test_an_https_frontend_s_certificate_is_checked_by_its_authority(bench, ask, tmp_path):
    pair = write_pair(tmp_path / "pair", "other")
    with OtherLaunch().listening(pair) as other:
        settings = ask(url=other.url, ca_file=pair[0])
        await answered(bench, other, temperature=0)
        await found(tmp_path, settings, same=1)
        settings = ask(url=other.url, run="b")
        await answered(bench, other, temperature=0)
        summary = await found(tmp_path, settings, failed=1)
        assert "its certificate is not trusted here: self" in summary["examples"][0]["reason"]
        settings = ask(url=other.url, run="c", ca_file=str(tmp_path / "gone"))
        await answered(bench, other, temperature=0)
        summary = await found(tmp_path, settings, failed=1)
    assert "can't be read as certificates here any more" in summary["examples"][0]["reason"]


async def test_one_that_is_not_there_or_never_answers_has_failed(bench, other, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_LEAST_LIMIT_S", 0.2)
    monkeypatch.setattr(mirror, "_LIMIT_FACTOR", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = ask(url=url)
        await answered(bench, temperature=0)
        summary = await found(tmp_path, settings, failed=1)
    assert summary["examples"][0]["reason"] == "it did not answer within 0.2 s"
    assert summary["statuses"]["new"] == {"none": 1}
    settings = ask(url=url, run="b")
    await answered(bench, temperature=0)
    assert "can't be reached" in (await found(tmp_path, settings, failed=1))["examples"][0]["reason"]


async def test_an_answer_without_end_is_cut_off(bench, other, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "MAX_ANSWER_BYTES", 1000)
    settings = ask()
    other.answer = lambda: (200, {}, b"x" * 5000)
    await answered(bench, temperature=0)
    assert "more than 1000 bytes" in (await found(tmp_path, settings, failed=1))["examples"][0]["reason"]


async def test_a_copy_shows_the_other_launch_s_key_and_its_mark_and_never_the_client_s_key(bench, other, ask, tmp_path):
    (tmp_path / "other.key").write_text("their-key\n")
    settings = ask(key_file=str(tmp_path / "other.key"), generation=4)
    reply = bench.chat({"authorization": "Bearer mine", "x-request-id": "one"}, seed=7, bireme={"session_id": "s"})
    await bench.workers.emit(4)
    await reply.end()
    await found(tmp_path, settings, failed=1)
    (headers,), (body,) = other.headers, other.bodies
    assert (headers["authorization"], headers["x-request-id"]) == ("Bearer their-key", "one")
    assert headers[copies.MARK] == "1" and body["bireme"] == {"session_id": "s", "routing": {"generation": 4}}


async def test_a_copy_is_not_copied_again_and_a_refused_request_not_sent(bench, other, ask, tmp_path):
    settings = ask()
    reply = bench.chat({copies.MARK: "1"}, temperature=0)
    await bench.workers.emit(4)
    assert (await reply.end()).status == 200
    assert (await bench.chat(max_tokens=-1).end()).status == 400
    await answered(bench, other, temperature=0)
    summary = await found(tmp_path, settings, same=1)
    assert summary["left_out"] == 1 and len(other.bodies) == 1


async def test_a_response_is_copied_without_being_kept_there_and_a_continued_one_not_at_all(
    bench, other, ask, tmp_path
):
    settings, fields = ask(), {}
    for num_left_out in (0, 1):
        body = {"model": "test", "input": "hi", "max_output_tokens": 4, "temperature": 0}
        reply = bench.call("POST", "/v1/responses", body | fields)
        other.answer = lambda reply=reply: (200, {}, reply.data)
        await bench.workers.emit(4)
        fields = {"previous_response_id": (await reply.end()).json()["id"]}
        await found(tmp_path, settings, same=1, left_out=num_left_out)
    assert [one["store"] for one in other.bodies] == [False]


async def test_what_has_no_room_is_dropped_and_no_client_waits(bench, other, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_MAX_HELD", 1)
    settings, may_answer = ask(), threading.Event()
    other.answer = lambda: (may_answer.wait(30), (503, {}, b"{}"))[1]
    for _ in range(3):
        reply = bench.chat(temperature=0)
        await bench.workers.emit(4)
        assert (await reply.end()).status == 200
    may_answer.set()
    summary = await found(tmp_path, settings, failed=1)
    assert summary["dropped"] == 2 and len(other.bodies) == 1


async def test_the_end_of_the_process_waits_for_no_copy(bench, other, ask):
    ask()
    may_answer = threading.Event()
    other.answer = lambda: (may_answer.wait(30), (200, {}, b"{}"))[1]
    await answered(bench, temperature=0)
    while not other.bodies:
        await asyncio.sleep(0.01)
    bench.app._mirror.close()
    bench.app._mirror._threads.shutdown()  # returns once its threads have ended, while the other launch still waits
    assert not may_answer.is_set()
    may_answer.set()


async def test_nothing_is_kept_of_a_request_while_nobody_compares(bench, tmp_path):
    reply = bench.chat(temperature=0)
    await bench.workers.emit(4)
    assert (await reply.end()).status == 200
    assert bench.app._mirror._threads is None and not list(tmp_path.iterdir())


async def test_a_comparison_begins_anew_with_each_order(bench, other, ask, tmp_path):
    first = ask()
    await answered(bench, other, temperature=0)
    await found(tmp_path, first, same=1)
    second = ask(run="b")
    await answered(bench, other, temperature=0)
    assert (await found(tmp_path, second, same=1))["same"] == 1


def test_figures_of_several_processes_are_added_up(tmp_path):
    settings = MirrorSettings(url="http://a:1", share=1.0, run="a")
    for pid, seconds in ((1, 0.1), (2, 0.3)):
        report = mirror_reports.MirrorReport(run="a")
        report.count("same")
        report.note_status("new", "200")
        report.ttft.add(seconds, 2 * seconds)
        (tmp_path / f"mirror-{pid}.json").write_text(json.dumps({
            "run": "a", "outcomes": report.outcomes, "statuses": report.statuses,
            "ttft": {"old": report.ttft.old, "new": report.ttft.new},
        }))  # fmt: skip
    (tmp_path / "mirror-3.json").write_text('{"run": "another", "outcomes": {"different": 9}}')
    (tmp_path / "mirror-4.json").write_text("of another version")
    summary = mirror_reports.summary(tmp_path, settings)
    assert (summary["compared"], summary["same"], summary["statuses"]["new"]) == (2, 2, {"200": 2})
    assert summary["ttft_ms"] == {"count": 2, "old": {"p50": 100.0, "p90": 300.0}, "new": {"p50": 200.0, "p90": 600.0}}
