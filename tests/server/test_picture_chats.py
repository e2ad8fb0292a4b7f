"""Pictures through /v1/chat/completions: together, EP/D and E/P/D, against plain transformers; and what goes wrong.

On the torch engine and, the last of RECIPES, on TensorRT-LLM's stand-in.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import time

import anthropic
import numpy as np
import openai
import pytest

from models.training.picture_world import dialogues, png
from tests.contract import stand_in_workers
from tests.server.openai_served import engine_of, five_ports, gauge, kill, series, served, settled, wait_for
from tests.server.picture_questions import (
    answers_of_transformers,
    chat_messages,
    data_url,
    held_out,
    num_right,
    picture_part,
)

pytestmark = pytest.mark.server
PORTS = five_ports()
ENCODER = {"tiny-vlm-agg": "decode", "tiny-vlm-ep-d": "prefill", "tiny-vlm-epd": "multimodal_encoder"}
PROFILES = {"tiny-vlm-agg": "1.2.1", "tiny-vlm-ep-d": "1.4", "tiny-vlm-epd": "1.3"}  # of TensorRT-LLM
QUESTIONS = held_out(12)
DAMAGED = b"\x89PNG\r\n\x1a\nx"


def of_a_soak(*recipe):
    return pytest.param(recipe, marks=pytest.mark.soak, id="-".join(recipe))


def of_ci(*recipe):
    return pytest.param(recipe, id="-".join(recipe))


RECIPES = [
    *(of_ci("torch", recipe) for recipe in ENCODER),
    of_ci("trtllm", "tiny-vlm-epd"),
    of_a_soak("trtllm", "tiny-vlm-agg"),
    of_a_soak("trtllm", "tiny-vlm-ep-d"),
]


@pytest.fixture(scope="module")
def oracle():
    return answers_of_transformers(QUESTIONS)


@pytest.fixture(scope="module", params=RECIPES)
def deployment(request, tmp_path_factory):
    engine, recipe = request.param
    folder = f"recipes/{recipe}"
    if engine == "trtllm":
        folder = stand_in_workers.copy_recipe(folder, tmp_path_factory.mktemp("recipe"), PROFILES[recipe])
    with served(folder, tmp_path_factory.mktemp("pictures") / "log", ports=PORTS) as running:
        running.engine, running.recipe = engine, recipe
        yield running


@pytest.fixture
async def client(deployment):
    url = f"http://127.0.0.1:{PORTS['openai']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def ask(client, messages, **fields):
    fields = {"model": "tiny-vlm", "max_tokens": 100} | fields
    return await client.chat.completions.create(messages=messages, **fields)


async def ask_all(client, asked, at_once=8):
    limit = asyncio.Semaphore(at_once)

    async def one(dialogue):
        async with limit:
            return (await ask(client, chat_messages(dialogue))).choices[0].message.content

    return await asyncio.gather(*map(one, asked))


def level(name):
    return gauge(name, PORTS["metrics"])


async def no_leases_are_left():
    """Every worker's leases are published, and stay at zero for longer than their way to the page takes."""
    deadline, zero_since = time.monotonic() + 90, None
    while zero_since is None or time.monotonic() - zero_since < 2.0:
        assert time.monotonic() < deadline
        values = series("bireme_kv_leases", PORTS["metrics"])
        is_zero = bool(values) and not any(values)
        zero_since = (zero_since or time.monotonic()) if is_zero else None
        await asyncio.sleep(0.1)


def fresh(seed, kind="describe"):
    """A question about a picture that nobody has asked about yet."""
    return next(dialogues(f"fresh-{seed}", 1, True, kind))


async def test_held_out_questions_are_answered_as_by_transformers(client, oracle):
    """Greedy output is the same token by token, so every deployment gives the same; the answers are right, too."""
    answers = await ask_all(client, QUESTIONS)
    right, expected = num_right(QUESTIONS, answers), num_right(QUESTIONS, oracle)
    print(f"held_out right={right} of={len(QUESTIONS)} by_transformers={expected}")
    assert right >= 0.95 * expected
    assert answers == oracle


async def test_requests_with_and_without_pictures_at_once_equal_their_solo_answers(client):
    kinds = ("describe", "fact", "two", "fact", "colour", "count", "fact", "describe")
    mixed = [fresh(f"mixed-{at}", kind) for at, kind in enumerate(kinds)]
    together = await ask_all(client, mixed)
    assert await ask_all(client, mixed, at_once=1) == together


async def test_the_same_picture_again_skips_the_encoder_and_reuses_kv(client):
    messages = chat_messages(fresh("again"))
    first = (await ask(client, messages)).usage
    encoded = await asyncio.to_thread(settled, "bireme_images_encoded_total", PORTS["metrics"])
    hits = level("bireme_embedding_cache_hits_total")
    again = (await ask(client, messages)).usage
    wait_for(lambda: level("bireme_embedding_cache_hits_total") == hits + 1)
    assert level("bireme_images_encoded_total") == encoded
    assert again.prompt_tokens == first.prompt_tokens > 64  # 64 tokens a picture
    assert again.prompt_tokens_details.cached_tokens >= 64


async def test_a_stream_gives_the_same_answer_and_its_usage_counts_the_picture(client):
    dialogue = fresh("stream")
    text, usage = "", None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await ask(client, chat_messages(dialogue), **options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    whole = await ask(client, chat_messages(dialogue))
    assert text == whole.choices[0].message.content
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 64


async def test_several_answers_to_one_picture(client):
    whole = await ask(client, chat_messages(fresh("several")), n=3)
    assert len({choice.message.content for choice in whole.choices}) == 1 and len(whole.choices) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([picture_part(b"no picture")], "messages[0].content[0].image_url: not a picture"),
        (
            [{"type": "text", "text": "?"}, picture_part(b"\x89PNG\r\n\x1a\nx")],
            "messages[0].content[1].image_url: the PNG",
        ),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}], "not resolve to a public address"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "messages[0].content[0].image_url: "),
        ([{"type": "image_url", "image_url": {"url": ""}}], "messages[0].content[0].image_url: missing"),
        ([{"type": "image_url", "image_url": {"url": "data:,x", "size": 1}}], "image_url.size: no such field"),
        ([{"type": "image_url", "image_url": {"url": "data:,x", "detail": "huge"}}], "image_url.detail: huge"),
        ([{"type": "image_embeds", "image_embeds": "AAAA"}], "messages[0].content[0].image_embeds: "),
        ([{"type": "video_url", "video_url": {}}], "video_url"),
    ],
)
async def test_a_wrong_part_is_a_400_that_names_it(client, content, message):
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, [{"role": "user", "content": content}])
    assert message in str(caught.value) and "passwd" not in str(caught.value)


async def test_more_pictures_than_allowed_are_refused(client):
    parts = [picture_part(png(fresh("many").pictures()[0]))] * 17
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[16\].image_url: more than 16 images"):
        await ask(client, [{"role": "user", "content": parts}])


async def test_pictures_go_into_user_messages(client):
    parts = [picture_part(png(fresh("system").pictures()[0]))]
    with pytest.raises(openai.BadRequestError, match="pictures go into user messages and tools' results"):
        await ask(client, [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}])


async def test_a_picture_in_a_tool_s_result_is_seen(deployment):
    dialogue = fresh("tool-result")
    data = base64.b64encode(png(dialogue.pictures()[0])).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    async with anthropic.AsyncAnthropic(base_url=deployment.url, api_key="none", max_retries=0) as client:

        async def ask_about(content):
            used = {"type": "tool_use", "id": "t1", "name": "shot", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
            turns = [("user", "look"), ("assistant", [used]), ("user", [result])]
            messages = [{"role": role, "content": content} for role, content in turns]
            return await client.messages.create(model="tiny-vlm", max_tokens=8, messages=messages)

        seen, blind = await ask_about([picture]), await ask_about("none")
    assert seen.usage.input_tokens > blind.usage.input_tokens + 8  # the picture's own tokens


async def test_a_placeholder_in_a_user_s_text_is_text(client):
    answer = await ask(client, [{"role": "user", "content": "<image> What colour is the sky?"}])
    assert answer.usage.prompt_tokens < 64


@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("stage", ["encoder", pytest.param("prefill", marks=pytest.mark.soak), "decode"])
@pytest.mark.parametrize(
    "deployment",
    [
        of_ci("torch", "tiny-vlm-epd"),
        of_a_soak("torch", "tiny-vlm-agg"),
        of_a_soak("torch", "tiny-vlm-ep-d"),
        of_a_soak("trtllm", "tiny-vlm-epd"),
        of_a_soak("trtllm", "tiny-vlm-ep-d"),
    ],
    indirect=True,
)
async def test_an_engine_lost_in_the_middle_gives_answers_or_an_error_to_try_again(deployment, client, stage):
    """The engine hangs, takes requests nevertheless, and is killed. What outlasts pipeline.stall_timeout_s gets 503."""
    if ENCODER[deployment.recipe] == stage or (stage == "prefill" and deployment.recipe == "tiny-vlm-agg"):
        pytest.skip("one engine does both")
    engine = engine_of(deployment, ENCODER[deployment.recipe] if stage == "encoder" else stage)
    asked = [fresh(f"{stage}-killed-{at}") for at in range(12)]
    running = [asyncio.ensure_future(ask(client, chat_messages(one))) for one in asked[:6]]
    await asyncio.sleep(0.2)
    os.kill(engine, signal.SIGSTOP)
    waiting = [asyncio.ensure_future(ask(client, chat_messages(one))) for one in asked[6:]]
    await asyncio.sleep(0.5)
    assert not any(one.done() for one in waiting)
    kill(engine)
    running = asyncio.gather(*running, *waiting, return_exceptions=True)
    ended = await asyncio.wait_for(running, 120)
    failed = [one for one in ended if isinstance(one, Exception)]
    assert all(isinstance(error, openai.InternalServerError) and error.status_code == 503 for error in failed)
    answers = [one.choices[0].message.content for one in ended if one not in failed]
    assert num_right([one for one, end in zip(asked, ended, strict=True) if end not in failed], answers) == len(answers)
    await no_leases_are_left()
    await asyncio.wait_for(until_answered(client, asked[0]), 90)


async def until_answered(client, dialogue):
    while True:
        try:
            answer = await ask(client, chat_messages(dialogue))
        except openai.InternalServerError:
            await asyncio.sleep(0.5)
        else:
            assert answer.choices[0].message.content == dialogue.turns[0].answer
            return


@pytest.mark.flaky(reruns=1)
async def test_clients_that_leave_while_decode_is_busy_leave_no_lease(deployment, client):
    """Decode hangs for a moment, so prefill's leases are there when the clients go."""
    if ENCODER[deployment.recipe] == "decode" or deployment.engine == "trtllm":
        pytest.skip("one engine does both, or moves KV itself: none is leased")
    engine, expired = engine_of(deployment, "decode"), level("bireme_kv_leases_expired_total")
    os.kill(engine, signal.SIGSTOP)
    try:
        running = [asyncio.ensure_future(ask(client, chat_messages(fresh(f"left-{at}")))) for at in range(6)]
        await asyncio.to_thread(wait_for, lambda: any(series("bireme_kv_leases", PORTS["metrics"])))
        assert not any(one.done() for one in running)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it hung for too long and was replaced
            os.kill(engine, signal.SIGCONT)
    await no_leases_are_left()
    assert level("bireme_kv_leases_expired_total") == expired
    await asyncio.wait_for(until_answered(client, fresh("after-left")), 90)


async def test_clients_that_leave_at_any_moment_are_cancelled_and_leave_nothing(client):
    cancelled, running = level("bireme_cancellations_total"), []
    while len(running) < 12 or level("bireme_cancellations_total") == cancelled:  # a busy machine takes longer to start
        assert len(running) < 60
        running.append(asyncio.ensure_future(ask(client, chat_messages(fresh(f"gone-{len(running)}")))))
        await asyncio.sleep(0.01 + 0.01 * len(running))
        running[-1].cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert any(isinstance(one, asyncio.CancelledError) for one in ended)
    dialogue = fresh("after")
    answer = await ask(client, chat_messages(dialogue))
    assert answer.choices[0].message.content == dialogue.turns[0].answer
    await no_leases_are_left()
    assert level("bireme_requests_running") == level("bireme_kv_blocks_used") == 0


def infer(model, **tensors):
    """Call a unary model over gRPC; returns its outputs by name."""
    import tritonclient.grpc as grpc

    kinds = {"O": "BYTES", "i": "INT32", "b": "BOOL", "u": "UINT8"}
    with grpc.InferenceServerClient(f"127.0.0.1:{PORTS['grpc']}") as server:
        inputs = []
        for name, array in tensors.items():
            inputs.append(grpc.InferInput(name, list(array.shape), kinds[array.dtype.kind]))
            inputs[-1].set_data_from_numpy(array)
        result = server.infer(model, inputs)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture
def encoder(deployment):
    if ENCODER[deployment.recipe] != "multimodal_encoder":
        pytest.skip("the recipe has no encoder of its own")


def test_the_encoder_model_serves_plain_clients(encoder):
    pictures = np.array([png(picture) for picture in fresh("plain", "two").pictures()], object)
    answer = infer("multimodal_encoder", images=pictures, return_embeddings=np.array([True]))
    handles = json.loads(answer["embedding_handles"][0])
    assert answer["shapes"].tolist() == [[64, 192]] * 2
    assert [one["hash"] for one in handles["pictures"]] == [name.decode() for name in answer["hashes"]]
    assert len(answer["embeddings"][0]) > 2 * 64 * 192 * 4


async def test_embeddings_that_a_client_brings_give_the_picture_s_answer(encoder, client):
    dialogue = fresh("brought")
    picture = np.array([png(dialogue.pictures()[0])], object)
    embeddings = infer("multimodal_encoder", images=picture, return_embeddings=np.array([True]))["embeddings"][0]
    part = {"type": "image_embeds", "image_embeds": data_url(embeddings).split(",")[1]}
    content = [part if kind == 0 else {"type": "text", "text": kind} for kind in dialogue.parts]
    system = chat_messages(dialogue)[:-1]
    answer = await ask(client, [*system, {"role": "user", "content": content}])
    assert answer.choices[0].message.content == dialogue.turns[0].answer


def test_an_encoder_s_request_is_checked(encoder):
    import tritonclient.utils

    with pytest.raises(tritonclient.utils.InferenceServerException, match="neither of images and embeddings"):
        infer("multimodal_encoder", return_embeddings=np.array([True]))
