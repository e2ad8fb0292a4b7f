"""A picture's way over two servers: one has encoder and decode, the other prefill; the frontend has none.

A third one has all three, of the next generation and of another revision, whose encoder says other things of a picture.
"""

import random
import threading
from types import SimpleNamespace

import openai
import pytest

from benchmarks.chaos.cluster import FarFrontend, wait_for
from benchmarks.chaos.launch import Launch
from benchmarks.chaos.topologies import Topology
from bireme.kv.routing.generations import choose
from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient
from tests.server.generations.changed_model import changed_model
from tests.server.picture_questions import MODEL, answers_of_transformers, chat_messages, held_out

pytestmark = pytest.mark.server
LIMIT_S = 180
QUESTIONS = held_out(1, ("describe", "two", "count"))
KEY = "the-operator-s-own-key"


def topology(name, settings=None, **replicas):
    return Topology(name, "recipes/tiny-vlm-epd", "models/tiny-vlm", "tiny-vlm", replicas, settings=settings or {})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The frontend, the next generation's server, its door and its model."""
    folder = tmp_path_factory.mktemp("pictures")
    other, door = changed_model(MODEL, folder / "tiny-vlm-new", "multi_modal_projector.linear_2.weight"), free_port()
    (folder / "key").write_text(KEY)
    of_next = ("--generation=1", "--weight=0", f"--admin-port={door}", f"--admin-key-file={folder / 'key'}")
    topologies = (
        topology("a", multimodal_encoder=1, prefill=0, decode=1),
        topology("b", multimodal_encoder=0, prefill=1, decode=0),
        topology("c", {"model": str(other)}, multimodal_encoder=1, prefill=1, decode=1),
    )
    shared = str(folder / "shared")
    launches = [
        Launch(one, folder, arguments=("--discovery", shared, "--canary-interval=0", *more), has_frontend=False)
        for one, more in zip(topologies, ((), (), of_next), strict=True)
    ]
    far = FarFrontend(0, topologies[0], shared, folder)
    starting = [threading.Thread(target=launch.start) for launch in launches]
    try:
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        far.start()
        wait_for(lambda: list(far.ready_workers().values()) == ["ready"] * 4, LIMIT_S, "no decode or no prefill")
        yield SimpleNamespace(
            frontend=far,
            new=launches[2].addresses["grpc"],
            door=DoorClient(f"http://127.0.0.1:{door}", KEY),
            other=other,
        )
    finally:
        far.stop()
        for launch in launches:
            launch.remove()


async def ask(client, dialogue, session=""):
    """Return the answer, and who has made it."""
    answer = await client.chat.completions.create(
        model="tiny-vlm", max_tokens=100, messages=chat_messages(dialogue),
        extra_body={"bireme": {"return_timing": True, "session_id": session}},
    )  # fmt: skip
    timing = answer.model_extra["bireme"]["timing"][0]
    return answer.choices[0].message.content, timing["prefill_worker"], timing["decode_worker"]


def client_of(served):
    url = f"http://{served.frontend.address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def test_embeddings_and_kv_cross_between_servers_and_answers_are_those_of_transformers(served):
    async with client_of(served) as client:
        found = [await ask(client, dialogue) for dialogue in QUESTIONS]
    assert [answer for answer, _, _ in found] == answers_of_transformers(QUESTIONS)
    (prefill,) = {prefill for _, prefill, _ in found}
    assert prefill.startswith("prefill@") and not prefill.endswith(served.new)


async def test_encoder_prefill_and_decode_of_a_request_are_of_one_generation(served):
    """By the answers: an encoder of the other generation has every question answered otherwise."""
    answers = [answers_of_transformers(QUESTIONS), answers_of_transformers(QUESTIONS, served.other)]
    assert not set(answers[0]) & set(answers[1])
    weights, draw = {0: 1.0, 1: 0.5}, random.Random()
    by_generation = {choose(weights, name, draw): name for name in (f"session {number}" for number in range(20))}
    async with client_of(served) as client:

        async def generations_of(session):
            """Return that of prefill, decode and answer, for each question."""
            found = [await ask(client, dialogue, session) for dialogue in QUESTIONS]
            new = [f"{kind}@{served.new}" for kind in ("prefill", "decode")]
            return {
                (int(prefill == new[0]), int(decode == new[1]), [one[at] for one in answers].index(answer))
                for at, (answer, prefill, decode) in enumerate(found)
            }

        assert await generations_of(by_generation[1]) == {(0, 0, 0)}
        served.door.post("/weight", weight=0.5)
        while await generations_of(by_generation[1]) != {(1, 1, 1)}:
            assert await generations_of(by_generation[0]) == {(0, 0, 0)}
        assert await generations_of(by_generation[0]) == {(0, 0, 0)}
    served.door.post("/weight", weight=None)
