"""What a canary asks a server for, and who is at fault when it fails."""

from __future__ import annotations

import http.server
import io
import json
import threading

import pytest

from bireme.canary_mark import is_canary
from bireme.config import Recipe, WorkerEntry
from bireme.errors import BiremeError, from_message
from bireme.launch import canary
from bireme.launch.canaries import OPENAI, Canaries, CanarySettings, OpenAITarget
from bireme.launch.canary import CanaryPrompt
from bireme.launch.console import Console
from bireme.launch.series import WorkerSeries
from bireme.openai.http.error_replies import reply_of

PROMPT = CanaryPrompt("a ship", tuple(range(33)))
MODELS = ("tokenizer", "prefill", "prefill_1", "decode", "completion")


class Deployment:
    """Answers as a deployment does; `answers` puts others in their place, by the end of the path or the model."""

    def __init__(self):
        self.calls: list[tuple[str, dict]] = []
        self.answers: dict[str, dict] = {}

    def answer(self, path, body):
        self.calls.append((path, body))
        model = path.split("/")[3] if path.startswith("/v2/models/") else path
        if model in self.answers:
            return self.answers[model]
        return {"tokenizer": {"input_ids": list(range(20))}, "prefill": {"disaggregated_params": "sealed"}}.get(
            model.removesuffix("_1"), {"text_output": "a"}
        )

    def called(self, model):
        return [body for path, body in self.calls if f"/{model}/" in path]


@pytest.fixture
def server():
    """Return (address, Deployment)."""
    deployment = Deployment()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            answer = deployment.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(answer).encode()
            self.send_response(answer.pop("status", 400) if "error" in answer else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listener.server_port}", deployment
        listener.shutdown()


def make_canaries(address, series=None, down=(), openai=None, console=None, key="", **replicas):
    workers = {stage: WorkerEntry(engine="mocker", replicas=count) for stage, count in replicas.items()}
    return Canaries(
        address, Recipe(model="m", workers=workers, name="m"), MODELS, openai, CanarySettings(timeout_s=5.0),
        console or Console("error"), series=lambda: series or {}, is_down=lambda name: name in down,
        on_hung=lambda *_: None, key=key,
    )  # fmt: skip


def test_the_prompt_is_plain_text_as_the_model_s_tokenizer_sees_it(server):
    address, deployment = server
    deployment.answers["tokenizer"] = {"input_ids": list(range(700, 740))}
    assert canary.make_prompt(address, "tokenizer", 33, 5.0).input_ids == tuple(range(700, 733))


def test_a_short_prompt_is_said_again_until_it_fills_a_block(server):
    address, deployment = server
    canary.make_prompt(address, "tokenizer", 33, 5.0)
    lengths = [len(body["text_input"].split()) for body in deployment.called("tokenizer")]
    assert len(lengths) > 1 and lengths[1] == 2 * lengths[0]


@pytest.mark.parametrize(("workers", "expected"), [({"decode": 1}, 2), ({"prefill": 1, "decode": 1}, 33)])
def test_a_prompt_has_more_than_a_block_where_kv_moves_and_else_a_few_tokens(server, workers, expected):
    address, deployment = server
    deployment.answers["tokenizer"] = {"input_ids": list(range(700, 740))}
    make_canaries(address, **workers).turn()
    assert len(deployment.called("decode" if len(workers) == 1 else "prefill")[0]["input_ids"]) == expected


def test_a_tokenizer_that_fails_is_told(server):
    address, deployment = server
    deployment.answers["tokenizer"] = {"error": "UNAVAILABLE: no vocabulary"}
    with pytest.raises(BiremeError, match="tokenizer: UNAVAILABLE: no vocabulary"):
        canary.make_prompt(address, "tokenizer", 33, 5.0)


def test_no_canary_finds_the_kv_of_another(server):
    address, deployment = server
    canary.probe_decode(address, "decode", PROMPT, 5)
    canary.probe_pair(address, "prefill", "decode", PROMPT, 5)
    canary.probe_text(address, "completion", PROMPT, 5)
    bodies = [body for _, body in deployment.calls]
    assert [body["max_tokens"] for body in bodies] == [2, 2, 2, 2]  # the second token needs the KV where decode is
    assert bodies[1]["cache_salt"] == bodies[2]["cache_salt"] and bodies[2]["disaggregated_params"] == "sealed"
    assert len({body["cache_salt"] for body in bodies} - {""}) == 3


def test_a_prefill_worker_that_refuses_is_at_fault(server):
    address, deployment = server
    deployment.answers["prefill"] = {"error": "UNAVAILABLE: prefill is starting"}
    found = canary.probe_pair(address, "prefill", "decode", PROMPT, 5)
    assert "is starting" in found.prefill.error and found.decode is None


def test_who_can_decode_alone_is_not_at_fault_for_a_transfer_that_fails(server):
    address, deployment = server
    answer = deployment.answer

    def no_transfer(path, body):
        told = answer(path, body)
        return {"error": "UNAVAILABLE: no such socket"} if "disaggregated_params" in body else told

    deployment.answer = no_transfer
    found = canary.probe_pair(address, "prefill", "decode", PROMPT, 5)
    assert found.prefill.error == "decode can't take over its prompts: UNAVAILABLE: no such socket"
    assert found.decode.is_ok and deployment.called("prefill")[-1]["abort"]  # nothing stays leased


def test_all_pairings_are_tried_over_time_and_each_worker_in_every_round(server):
    address, deployment = server
    canaries = make_canaries(address, prefill=2, decode=1)
    canaries.turn()
    assert len(deployment.called("prefill")) == len(deployment.called("prefill_1")) == 1
    assert len(deployment.called("decode")) == 2 and len(deployment.called("completion")) == 1


def test_a_canary_that_is_itself_wrong_takes_nobody_down(server):
    address, deployment = server
    deployment.answers["completion"] = {"error": "INVALID_ARGUMENT: text_input: this model takes pictures only"}
    canaries = make_canaries(address, decode=1)
    canaries.turn()
    assert canaries.problem("completion") == ""


BUSY = "RESOURCE_EXHAUSTED: decode: all 2 workers are busy (router.busy); try again in 3 s"
LATE = "DEADLINE_EXCEEDED: queue time: not begun after 2 s (scheduler_config.max_queue_time_s); try again later"


@pytest.mark.parametrize("refusal", [BUSY, LATE])
@pytest.mark.parametrize("way", ["prefill", "decode", "completion"])
def test_a_busy_deployment_is_none_that_fails(server, way, refusal):
    address, deployment = server
    deployment.answers[way] = {"error": refusal}
    canaries = make_canaries(address, prefill=1, decode=1)
    canaries.turn()
    assert deployment.called(way) and [canaries.problem(name) for name in MODELS] == [""] * len(MODELS)


@pytest.mark.parametrize("refusal", [BUSY, LATE])
def test_the_frontend_s_word_for_busy_is_no_failure_of_its_way(server, refusal):
    address, deployment = server
    error = reply_of(from_message(refusal))
    deployment.answers["/v1/completions"] = {"status": error.status, **json.loads(error.body)}
    canaries = make_canaries(address, openai=OpenAITarget(address, "key"), decode=1)
    canaries.turn()
    assert deployment.calls[-1][0] == "/v1/completions" and canaries.problem(OPENAI) == ""


def test_that_all_are_busy_is_logged_once_however_long_it_lasts(server):
    address, deployment = server
    log = io.StringIO()
    canaries = make_canaries(address, console=Console("warning", stream=log), decode=1)
    for seconds in range(3):
        deployment.answers["completion"] = {"error": BUSY.replace("3 s", f"{seconds} s")}
        canaries.turn()
    assert len(deployment.called("completion")) == 3 and log.getvalue().count("canary_refused") == 1


def test_decode_that_was_busy_a_moment_ago_says_nothing_of_the_transfer(server):
    address, deployment = server
    answer = deployment.answer

    def busy_once(path, body):
        told = answer(path, body)
        return {"error": BUSY} if "disaggregated_params" in body else told

    deployment.answer = busy_once
    found = canary.probe_pair(address, "prefill", "decode", PROMPT, 5)
    assert found.prefill.is_ok and found.decode.is_busy and deployment.called("prefill")[-1]["abort"]


def test_a_way_that_fails_is_a_problem_until_it_works_again(server):
    address, deployment = server
    deployment.answers["completion"] = {"error": "UNAVAILABLE: no decode worker"}
    canaries = make_canaries(address, decode=1)
    assert canaries.turn() <= 1.0 and "no decode worker" in canaries.problem("completion")
    del deployment.answers["completion"]
    assert canaries.turn() > 1.0 and canaries.problem("completion") == ""


def test_a_way_that_requests_have_just_gone_needs_no_canary(server):
    address, deployment = server
    series = {"completion": WorkerSeries(served=3)}
    canaries = make_canaries(address, series, decode=1)
    canaries.turn()
    series["completion"] = WorkerSeries(served=4)  # by one: canaries are not counted
    canaries.turn()
    assert len(deployment.called("completion")) == 1
    canaries.turn()
    assert len(deployment.called("completion")) == 2


def test_each_canary_is_marked_with_the_deployment_s_key(server, monkeypatch):
    address, deployment = server
    make_canaries(address, prefill=1, decode=1, key="ab").turn()
    asked = [body for path, body in deployment.calls if "tokenizer" not in path]
    monkeypatch.setenv("BIREME_KEY", "ab")
    salts = [body["cache_salt"] for body in asked]
    assert len(salts) == 3 and all(map(is_canary, salts)) and len(set(salts)) == 2  # prefill and decode share one
    canary.probe_embedding(address, "embedding", CanaryPrompt("", (), "ab"), 5)
    assert is_canary(deployment.called("embedding")[0]["canary"])


def test_a_worker_with_work_gets_no_canary_and_one_without_does(server):
    address, deployment = server
    series = {"decode": WorkerSeries(steps=3)}
    canaries = make_canaries(address, series, decode=1)
    canaries.turn()
    series["decode"] = WorkerSeries(steps=9, queued=4)
    canaries.turn()
    assert len(deployment.called("decode")) == 1
    series["decode"] = WorkerSeries(steps=9, queued=4)  # no step since: it may hang
    canaries.turn()
    assert len(deployment.called("decode")) == 2


def test_a_prefill_worker_that_failed_is_asked_again_while_decode_works_for_others(server):
    address, deployment = server
    names = ("decode", "decode_1")
    series = dict.fromkeys(names, WorkerSeries(steps=1, queued=4, imported=1))
    canaries = make_canaries(address, series, prefill=2, decode=2)
    deployment.answers["prefill_1"] = {"error": "UNAVAILABLE: prefill_1 is starting"}
    canaries.turn()
    del deployment.answers["prefill_1"]
    series |= dict.fromkeys(names, WorkerSeries(steps=2, queued=4, imported=2))
    canaries.turn()
    assert canaries.problem("prefill_1") == ""


def test_without_prefill_workers_decode_is_asked_alone(server):
    address, deployment = server
    make_canaries(address, down=("prefill", "prefill_1"), prefill=2, decode=1).turn()
    assert deployment.called("prefill") == [] and "disaggregated_params" not in deployment.called("decode")[0]


def test_a_port_that_refuses_is_the_door_s_matter():
    canaries = make_canaries("127.0.0.1:1", decode=1)
    canaries.turn()
    assert canaries.problem("completion") == canaries.problem("decode") == ""
