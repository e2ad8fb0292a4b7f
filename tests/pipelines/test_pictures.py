"""Pictures of a chat over fake workers: each has as many tokens as its source has bytes."""

import asyncio
import json

import msgspec
import numpy as np
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.discovery.records import WorkerRecord
from bireme.errors import DeadlineExceededError, EngineLostError, EngineStalledError, RequestError, UnavailableError
from bireme.messages import EncodeSource
from bireme.metrics import Registry
from bireme.multimodal.model_config import PictureModel
from bireme.multimodal.wire import Multimodal
from bireme.pipelines.chat_answer import ResponseMeta, WholeAnswer
from bireme.pipelines.chat_request import parse_chat
from bireme.pipelines.chat_service import ChatService
from bireme.pipelines.pictures import PictureSource, RequestPictures
from bireme.pipelines.routing import make_router
from bireme.pipelines.services import Services
from bireme.text.tokenizer import TextTokenizer
from bireme.workers.fake import FakeWorkers, token_at

PLACEHOLDER = 35
MODEL = PictureModel("Test", PLACEHOLDER)
IDS = np.array([7, PLACEHOLDER, 8, PLACEHOLDER], np.int32)


def source(content=b"abc", where="messages[0].content[1].image_url"):
    return PictureSource(EncodeSource("image", content), where)


class Bench:
    def __init__(self, encoders=1, prefill=0, **tree):
        workers = {"decode": {"engine": "mocker"}}
        if encoders:
            workers["multimodal_encoder"] = {"replicas": encoders}
        if prefill:
            workers["prefill"] = {"engine": "mocker"}
        tree = {"model": "none", "workers": workers, "name": "test", "router": {"transfer_ms": 0}} | tree
        self.members = {}
        self.recipe = convert(tree, Recipe, "test")
        self.workers = FakeWorkers()
        metrics = Registry("chat")
        self.services = Services(self.recipe, self.workers, make_router(self.recipe, metrics), metrics)

    def pictures(self, *sources, deadline=0.0):
        return RequestPictures(self.services, MODEL, sources or (source(), source(b"abcd")), deadline)

    async def background(self):
        while self.services._background:
            await asyncio.sleep(0)


def items(blob):
    return msgspec.json.decode(blob, type=Multimodal).items


async def test_the_prompt_gets_room_for_each_picture():
    pictures = Bench().pictures()
    expanded = await pictures.expand(IDS, 1)
    assert expanded.tolist() == [7, 35, 35, 35, 8, 35, 35, 35, 35]
    assert [(item.position, item.num_tokens, item.handle) for item in items(pictures.places)] == [
        (1, 3, None),
        (5, 4, None),
    ]


async def test_each_attempt_has_handles_of_its_own():
    bench = Bench()
    pictures = bench.pictures()
    await pictures.expand(IDS, 2)
    taken = [await pictures.take() for _ in range(3)]
    handles = [item.handle for one in taken for item in items(one.multimodal)]
    assert len(set(handles)) == 6 and bench.workers.log == ["multimodal_encoder encode"] * 2


async def test_handles_that_nobody_took_are_given_back():
    bench = Bench()
    pictures = bench.pictures()
    await pictures.expand(IDS, 3)
    taken = await pictures.take()
    pictures.close()
    await bench.background()
    assert len(bench.workers.handles) == 2
    taken.release()
    await bench.background()
    assert not bench.workers.handles


async def test_a_template_without_places_is_said_and_costs_no_lease():
    bench = Bench()
    with pytest.raises(RequestError, match="2 images, but the model's chat template made places for 0"):
        await bench.pictures().expand(np.array([1, 2], np.int32), 1)
    await bench.background()
    assert not bench.workers.handles


async def test_a_refused_picture_has_the_name_of_its_part():
    with pytest.raises(RequestError, match=r"^messages\[3\].content\[0\].image_url: empty; send a picture$"):
        await Bench().pictures(source(b"", "messages[3].content[0].image_url")).expand(IDS, 1)


async def test_another_encoder_takes_over():
    bench = Bench(encoders=2)
    bench.workers.down["multimodal_encoder"] = EngineLostError("its engine died")
    for _ in range(8):
        await bench.pictures().expand(IDS, 1)
    assert bench.workers.log.count("multimodal_encoder_1 encode") == 8


async def test_an_encoder_that_comes_back_in_time_is_waited_for():
    bench = Bench()
    bench.workers.down["multimodal_encoder"] = UnavailableError("its engine is starting")
    running = asyncio.ensure_future(bench.pictures().expand(IDS, 1))
    while len(bench.workers.log) < 2:
        await asyncio.sleep(0)
    del bench.workers.down["multimodal_encoder"]
    assert len(await running) == 9


async def test_an_encoder_that_stays_away_gives_an_error_to_try_again():
    bench = Bench(pipeline={"stall_timeout_s": 0.05})
    bench.workers.down["multimodal_encoder"] = UnavailableError("its engine is starting")
    with pytest.raises(UnavailableError, match="its engine is starting"):
        await bench.pictures().expand(IDS, 1)


async def test_an_encoder_that_is_lost_again_and_again_is_given_up():
    bench = Bench(pipeline={"migration_limit": 2})
    bench.workers.down["multimodal_encoder"] = EngineLostError("its engine died")
    with pytest.raises(UnavailableError, match="tried 3 times"):
        await bench.pictures().expand(IDS, 1)


async def test_pictures_in_two_stalls_are_given_to_no_third_engine():
    bench = Bench(pipeline={"migration_limit": 5})
    bench.workers.down["multimodal_encoder"] = EngineStalledError("its engine stood still")
    with pytest.raises(UnavailableError, match="tried 2 times"):
        await bench.pictures().expand(IDS, 1)
    assert bench.workers.log == ["multimodal_encoder encode"] * 2


async def test_a_client_that_leaves_stops_the_encode():
    bench = Bench()
    bench.workers.hold.add("multimodal_encoder")
    running = asyncio.ensure_future(bench.pictures().expand(IDS, 1))
    while not bench.workers.waiting:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await bench.background()
    assert bench.workers.log == ["multimodal_encoder encode", "multimodal_encoder abort encode"]
    assert not bench.workers.handles


async def test_after_the_deadline_nothing_is_encoded():
    bench = Bench()
    with pytest.raises(DeadlineExceededError, match="its images were not encoded"):
        await bench.pictures(deadline=0.001).expand(IDS, 1)
    assert not bench.workers.log


async def test_a_url_that_shows_something_else_by_now_ends_the_request():
    bench = Bench()
    pictures = bench.pictures()
    await pictures.expand(IDS, 1)
    await pictures.take()
    bench.workers._encoded = lambda source, request_id, copies: FakeWorkers._encoded(
        bench.workers, EncodeSource("image", source.content[::-1]), request_id, copies
    )
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].image_url: it has changed"):
        await pictures.take()


@pytest.mark.parametrize(
    ("workers", "place"),
    [({"encoders": 1, "prefill": 1}, "multimodal_encoder"), ({"encoders": 0, "prefill": 1}, "prefill"),
     ({"encoders": 0}, "decode")],
)  # fmt: skip
async def test_the_worker_with_the_vision_tower_encodes(workers, place):
    bench = Bench(**workers)
    await bench.pictures().expand(IDS, 1)
    assert bench.workers.log == [f"{place} encode"]


# Generations and revisions


def beside_a_new_generation(**weights):
    """Encoder and decode of two launches, of another revision each."""
    bench = Bench(pipeline={"stall_timeout_s": 1})
    servers = {"": (0, "old"), "b:1": (1, "new")}
    for worker in ("multimodal_encoder", "decode"):
        for server, (generation, revision) in servers.items():
            facts = {"generation": generation, "revision": revision, "weight": weights.get(revision, 1.0)}
            record = WorkerRecord(worker=worker, server=server, life=1, tokens_per_block=32, **facts)
            bench.members[record.id] = record
    bench.services.set_workers(bench.members)
    return bench


@pytest.mark.parametrize(("weight", "place"), [(1.0, "multimodal_encoder@b:1"), (0.0, "multimodal_encoder")])
async def test_pictures_are_encoded_in_the_generation_that_the_weights_choose(weight, place):
    bench = beside_a_new_generation(new=weight)
    for _ in range(3):
        await bench.pictures().expand(IDS, 1)
    assert set(bench.workers.log) == {f"{place} encode"}


async def test_embeddings_of_another_revision_are_given_back_and_made_again_by_one_of_its_own():
    bench = beside_a_new_generation(new=0.0)
    pictures = bench.pictures()
    await pictures.expand(IDS, 2)
    taken = await pictures.take("new")
    await bench.background()
    assert bench.workers.log == ["multimodal_encoder encode", "multimodal_encoder@b:1 encode"]
    assert set(bench.workers.handles) == {item.handle for item in items(taken.multimodal)}


async def test_without_an_encoder_of_the_revision_the_attempt_ends_with_its_name():
    bench = beside_a_new_generation(new=0.0)
    pictures = bench.pictures()
    await pictures.expand(IDS, 1)
    del bench.members["multimodal_encoder@b:1"]
    bench.services.set_workers(dict(bench.members))
    with pytest.raises(
        UnavailableError, match="no multimodal_encoder worker of the model's revision new takes pictures"
    ):
        await pictures.take("new")


async def test_a_revision_with_another_number_of_tokens_for_a_picture_is_not_taken_for_the_prompt_s():
    bench = beside_a_new_generation(new=0.0)
    pictures = bench.pictures()
    await pictures.expand(IDS, 1)
    pictures._items = tuple(msgspec.structs.replace(item, num_tokens=item.num_tokens + 1) for item in pictures._items)
    with pytest.raises(UnavailableError, match="revision new of the model has another number of tokens"):
        await pictures.take("new")
    await bench.background()
    assert not bench.workers.handles


async def test_a_picture_s_request_is_decoded_where_it_was_encoded():
    bench = beside_a_new_generation(new=0.5)
    for _ in range(12):
        _, running = chat(bench, PICTURE)
        await bench.workers.emit(3)
        await running
    encoded = [line.split()[0].partition("@")[2] for line in bench.workers.log if " encode" in line]
    decoded = [line.split()[0].partition("@")[2] for line in bench.workers.log if line.startswith("decode")]
    assert encoded == decoded and set(encoded) == {"", "b:1"}


# Through the chat service


def pictured_letters():
    """One token a character; a picture is `#`."""
    inner = Inner(models.WordLevel({chr(code): code for code in range(1, 1000)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ '#' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    return TextTokenizer(inner, templates={"default": template})


def chat(bench, *content, **fields):
    service = ChatService(bench.services, pictured_letters())
    service._picture_model = MODEL  # a mocker's recipe has no model folder
    body = {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 3, **fields}
    answer = WholeAnswer(ResponseMeta.of("test"), fields.get("n", 1), False)
    request = parse_chat(json.dumps(body), bench.recipe)
    return answer, asyncio.ensure_future(service.run(request, answer, 0.0))


PICTURE = {"type": "image_url", "image_url": {"url": "data:,xyz"}}
TEXT = {"type": "text", "text": "ab"}


async def test_text_and_pictures_keep_their_order_and_usage_counts_the_pictures():
    bench = Bench()
    answer, running = chat(bench, TEXT, PICTURE, TEXT)
    await bench.workers.emit(3)
    await running
    prompt = [ord("a"), ord("b"), *[PLACEHOLDER] * len("data:,xyz"), ord("a"), ord("b")]
    assert bench.workers.log == ["multimodal_encoder encode", "decode context_and_generation 0"]
    assert answer.usages[0].prompt_tokens == len(prompt)
    assert json.loads(answer.json())["choices"][0]["message"]["content"] == "".join(
        chr(token_at(prompt, at)) for at in range(3)
    )


async def test_a_prompt_that_its_pictures_make_too_long_is_refused_and_leaves_no_handles():
    bench = Bench(limits={"max_prompt_tokens": 9})
    _, running = chat(bench, TEXT, PICTURE)
    with pytest.raises(RequestError, match="prompt: 11 tokens; limits.max_prompt_tokens is 9"):
        await running
    await bench.background()
    assert bench.workers.log == ["multimodal_encoder encode"] and not bench.workers.handles


async def test_a_stream_that_moves_takes_its_pictures_along_and_leaves_no_lease():
    bench = Bench()
    _, running = chat(bench, PICTURE)
    await bench.workers.emit(1)
    await bench.workers.lose("decode")
    await bench.workers.emit(2)
    await running
    await bench.background()
    assert bench.workers.log == ["multimodal_encoder encode", "decode context_and_generation 0"] + [
        "multimodal_encoder encode", "decode context_and_generation 1",
    ]  # fmt: skip
    assert not bench.workers.handles


async def test_decode_after_prefill_gets_places_and_no_handles():
    bench = Bench(prefill=1)
    _, running = chat(bench, PICTURE)
    await bench.workers.reached("decode")
    (generation,) = bench.workers.running
    assert [item.handle for item in items(generation.request.multimodal)] == [None]
    await bench.workers.emit(3)
    await running
    assert bench.workers.log == [
        "multimodal_encoder encode", "prefill context_only", "decode generation_only 0",
    ]  # fmt: skip
    assert not bench.workers.handles


async def test_handles_that_no_prefill_has_fetched_are_given_back():
    bench = Bench(prefill=1, pipeline={"stall_timeout_s": 0.01, "enforce_disaggregation": True})
    bench.workers.down["prefill"] = UnavailableError("its engine is starting")
    _, running = chat(bench, PICTURE)
    with pytest.raises(UnavailableError, match="its engine is starting"):
        await running
    await bench.background()
    assert not bench.workers.handles


async def test_a_cancelled_chat_gives_its_handles_back():
    bench = Bench()
    _, running = chat(bench, PICTURE, n=2)
    await bench.workers.reached("decode")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await bench.background()
    assert not bench.workers.handles


async def test_a_text_model_refuses_pictures_by_the_part():
    bench = Bench()
    service = ChatService(bench.services, pictured_letters())
    request = parse_chat(json.dumps({"messages": [{"role": "user", "content": [TEXT, PICTURE]}]}), bench.recipe)
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].type: image_url; this model reads text parts"):
        await service.run(request, WholeAnswer(ResponseMeta.of("test"), 1, False), 0.0)
