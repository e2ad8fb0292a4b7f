"""A picture's way over two servers: one has encoder and decode, the other prefill; the frontend has none."""

import threading

import openai
import pytest

from benchmarks.chaos.cluster import FarFrontend, wait_for
from benchmarks.chaos.launch import Launch
from benchmarks.chaos.topologies import Topology
from tests.server.picture_questions import answers_of_transformers, chat_messages, held_out

pytestmark = pytest.mark.server
LIMIT_S = 180
QUESTIONS = held_out(1, ("describe", "two", "count"))


def topology(name, **replicas):
    return Topology(name, "recipes/tiny-vlm-epd", "models/tiny-vlm", "tiny-vlm", replicas)


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    topologies = (
        topology("a", multimodal_encoder=1, prefill=0, decode=1),
        topology("b", multimodal_encoder=0, prefill=1, decode=0),
    )
    shared = str(folder / "shared")
    launches = [
        Launch(one, folder, arguments=("--discovery", shared, "--canary-interval=0"), has_frontend=False)
        for one in topologies
    ]
    far = FarFrontend(0, topologies[0], shared, folder)
    starting = [threading.Thread(target=launch.start) for launch in launches]
    try:
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        far.start()
        wait_for(lambda: list(far.ready_workers().values()) == ["ready"] * 2, LIMIT_S, "no decode or no prefill")
        yield far
    finally:
        far.stop()
        for launch in launches:
            launch.remove()


async def test_embeddings_and_kv_cross_between_servers_and_answers_are_those_of_transformers(frontend):
    async with openai.AsyncOpenAI(base_url=f"http://{frontend.address}/v1", api_key="none", max_retries=0) as client:
        answers, prefills = [], set()
        for dialogue in QUESTIONS:
            answer = await client.chat.completions.create(
                model="tiny-vlm", max_tokens=100, messages=chat_messages(dialogue),
                extra_body={"bireme": {"return_timing": True}},
            )  # fmt: skip
            answers.append(answer.choices[0].message.content)
            prefills.add(answer.model_extra["bireme"]["timing"][0]["prefill_worker"])
    assert answers == answers_of_transformers(QUESTIONS)
    assert len(prefills) == 1 and prefills.pop().startswith("prefill@")
