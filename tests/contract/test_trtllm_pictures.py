"""Pictures into TensorRT-LLM's prefill: answers equal to transformers' generate, in each way of serving and release."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from bireme.errors import ConfigError, EngineLostError, RequestError, ResourceExhaustedError, from_message
from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import BlocksStored
from bireme.kv.blocks.hashing import MediaSpan
from bireme.kv.routing.prompt_hashing import PromptHasher
from bireme.multimodal.wire import Multimodal, open_multimodal
from tests.contract import picture_harness
from tests.contract.trtllm_harness import KEY
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch import picture_models
from tests.engines.torch.picture_models import PLACEHOLDER, WORDS, PictureModel, cases, pixels

MODES = ("agg", "ep-d", "e-p-d")
NAMES = ("llava_next", "qwen2_5_vl")
SIZE = 8  # tokens a block


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    return functools.cache(lambda name: PictureModel(tmp_path_factory.mktemp(name), getattr(picture_models, name)))


@pytest.fixture(scope="module")
def deploy(profile, models):
    made = {}

    def get(name="llava_next", mode="agg", **yaml):
        key = (name, mode, str(yaml))
        if key not in made:
            made[key] = picture_harness.Deployment(models(name).path, mode, **yaml)
        return made[key]

    yield get
    for deployment in made.values():
        deployment.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_output_equals_generate(models, deploy, name, mode):
    model, deployment = models(name), deploy(name, mode)
    for ids, pictures in cases(model):
        expanded = deployment.prepare(ids, pictures)[0]
        assert deployment.run(ids, pictures, max_tokens=24, ignore_eos=True) == model.generate(expanded, pictures, 24)


def test_output_through_pools_equals_generate(models, deploy):
    model = models("llava_next")
    deployment = deploy("llava_next", "e-p-d", multimodal_config={"embedding_pool_bytes": 1 << 20})
    ids, pictures = cases(model)[2]
    expanded = deployment.prepare(ids, pictures)[0]
    assert deployment.run(ids, pictures, max_tokens=8, ignore_eos=True) == model.generate(expanded, pictures, 8)
    pools = [deployment.shares[stage]._pool for stage in ("multimodal_encoder", "prefill")]
    wait_for(lambda: len(deployment.network.members["multimodal_encoder-mm"].leases) == 2)  # of `prepare`
    taken = [(1 << 20) // 256 - pool.num_free for pool in pools]
    assert taken == [sum(one == PLACEHOLDER for one in expanded), 0]


def test_a_request_that_goes_on_after_a_loss_equals_one_that_was_never_lost(models, deploy):
    """Decode computes prompt and resumed tokens itself, with embeddings from the encoder."""
    model, deployment = models("qwen2_5_vl"), deploy("qwen2_5_vl", "e-p-d")
    ids, pictures = cases(model)[2]
    whole = deployment.run(ids, pictures, max_tokens=24, ignore_eos=True)
    prompt, handles, _ = deployment.prepare(ids, pictures)
    fields = {"num_resumed": 7, "multimodal": handles, "max_tokens": 24, "ignore_eos": True}
    assert deployment.engines["decode"].tokens([*prompt, *whole[:7]], **fields) == whole[7:]


@pytest.mark.parametrize("mode", ["agg", "e-p-d"])
def test_the_same_picture_shares_kv_and_another_one_does_not(models, deploy, mode):
    deployment, ids = deploy("llava_next", mode), models("llava_next").prompt(WORDS[2], None, WORDS[2])

    def cached(picture, **fields):
        return deployment.begin(ids, [picture], **fields).wait().usage.cached_tokens

    cached(pixels(11))
    assert cached(pixels(11)) > len(WORDS[2]) // SIZE * SIZE
    assert cached(pixels(12)) == len(WORDS[2]) // SIZE * SIZE
    assert cached(pixels(11), cache_salt="tenant") == 0


def test_blocks_of_a_picture_have_the_hashes_that_a_router_computes(models, deploy, profile):
    deployment, ids = deploy("llava_next", "agg"), models("llava_next").prompt(WORDS[0], None, WORDS[1], None, WORDS[2])
    decode = deployment.engines["decode"]
    decode.engine.kv_events()
    pictures = [pixels(21), pixels(22, 90, 40)]
    prompt, handles, _ = deployment.prepare(ids, pictures)
    decode.tokens(prompt, multimodal=handles)
    items = open_multimodal(handles, KEY)
    spans = [MediaSpan(one.position, one.position + one.num_tokens, bytes.fromhex(one.hash)) for one in items]
    expected = set(PromptHasher(SIZE)(np.array(prompt, np.int32), media=spans).tolist())
    told = set()

    def all_are_told():
        events = [event for event in decode.engine.kv_events() if isinstance(event, BlocksStored)]
        told.update(block.block_hash for event in events for block in event.blocks)
        return expected <= told

    wait_for(all_are_told)


def test_decode_keeps_the_blocks_of_other_pictures_apart(models, deploy):
    """It gets no hashes: without a salt, equal places of two pictures would be one to it."""
    deployment, ids = deploy("llava_next", "e-p-d"), models("llava_next").prompt(WORDS[2], None, WORDS[0])
    decode, salts = deployment.engines["decode"], []
    for picture in (pixels(31), pixels(32), pixels(31)):
        deployment.run(ids, [picture])
        salts.append(decode.llm.last_call["cache_salt"])
    assert salts[0] == salts[2] != salts[1]
    deployment.run(models("llava_next").prompt(WORDS[2]))
    assert decode.llm.last_call["cache_salt"] is None


def test_embeddings_are_let_go_of_with_the_first_token_and_with_an_abort(models, deploy):
    deployment, ids = deploy("llava_next", "agg"), models("llava_next").prompt(WORDS[0], None, WORDS[1])
    decode = deployment.engines["decode"]
    store, leases = decode.engine._loaded.pictures._store, deployment.network.members["decode-mm"].leases
    num_before = len(leases)
    answer = deployment.begin(ids, [pixels(41)], max_tokens=200, ignore_eos=True)
    assert answer.has_tokens.wait(30)
    wait_for(lambda: store.held_bytes == 0)
    decode.abort(answer)
    assert answer.wait().reason == "cancelled"
    assert len(leases) == num_before


def test_lost_embeddings_end_the_request_so_that_it_is_sent_again(models, deploy):
    deployment, ids = deploy("llava_next", "e-p-d"), models("llava_next").prompt(WORDS[0], None, WORDS[1])
    prompt, handles, _ = deployment.prepare(ids, [pixels(51)])
    fields = {"request_type": "context_only", "multimodal": handles}
    prefill = deployment.engines["prefill"]
    assert not prefill.ask(prompt, **fields).wait().error
    error = from_message(prefill.ask(prompt, **fields).wait().error)  # a handle is good for one fetch
    assert isinstance(error, EngineLostError)
    assert prefill.engine._loaded.pictures._store.held_bytes == 0


def test_an_abort_while_the_embeddings_are_on_their_way_ends_the_request(models, deploy):
    deployment, ids = deploy("llava_next", "e-p-d"), models("llava_next").prompt(WORDS[0], None, WORDS[1])
    prompt, handles, _ = deployment.prepare(ids, [pixels(61)])
    prefill = deployment.engines["prefill"]
    share = deployment.shares["prefill"]
    fetch, share.fetch = share.fetch, lambda handle, done: None
    try:
        answer = prefill.ask(prompt, request_type="context_only", multimodal=handles)
        prefill.abort(answer)
        assert answer.wait().reason == "cancelled"
    finally:
        share.fetch = fetch
    assert prefill.engine._loaded.pictures._store.held_bytes == 0


def test_more_embeddings_than_may_be_held_are_refused(models, deploy):
    limits = {"multimodal_config": {"max_held_bytes": 1000}}
    deployment, ids = deploy("llava_next", "agg", **limits), models("llava_next").prompt(None)
    prompt, handles, _ = deployment.prepare(ids, [pixels(71)])
    with pytest.raises(ResourceExhaustedError, match="max_held_bytes is 1000"):
        deployment.engines["decode"].ask(prompt, multimodal=handles)


def test_a_prompt_that_would_be_read_as_other_tokens_is_refused(models, deploy, monkeypatch):
    deployment, ids = deploy("llava_next", "agg"), models("llava_next").prompt(WORDS[0], None)
    decode = deployment.engines["decode"]
    tokenizer = decode.engine._loaded.pictures._tokenizer
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **_: "<9> <5>")
    prompt, handles, _ = deployment.prepare(ids, [pixels(81)])
    error = from_message(decode.ask(prompt, multimodal=handles).wait().error)
    assert isinstance(error, RequestError)
    assert "would read the text of this one as other tokens" in str(error)
    monkeypatch.undo()
    assert deployment.run(ids, [pixels(81)])


def test_a_tokenizer_that_puts_a_token_of_its_own_first_gets_a_text_without_it(models, deploy):
    from tokenizers.processors import TemplateProcessing

    deployment, model = deploy("llava_next", "agg"), models("llava_next")
    tokenizer = deployment.engines["decode"].engine._loaded.pictures._tokenizer
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<1> $A", special_tokens=[("<1>", 1)])
    try:
        ids = [1, *model.prompt(WORDS[0], None, WORDS[1])]
        expanded = deployment.prepare(ids, [pixels(91)])[0]
        assert deployment.run(ids, [pixels(91)], max_tokens=8, ignore_eos=True) == model.generate(
            expanded, [pixels(91)], 8
        )
    finally:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", special_tokens=[])


def test_what_a_release_refuses_of_pictures_ends_that_request_alone(models, deploy, monkeypatch):
    deployment, ids = deploy("llava_next", "agg"), models("llava_next").prompt(WORDS[0], None)
    processor = type(deployment.engines["decode"].llm.input_processor)

    def refuse(self, inputs, handles):
        raise NotImplementedError("Only one mm_handle is supported for LlavaNext for now")

    with monkeypatch.context() as patched:
        patched.setattr(processor, "expand", refuse)
        error = deployment.begin(ids, [pixels(95)]).wait().error
    assert "TensorRT-LLM refuses this request: Only one mm_handle" in error
    assert deployment.run(ids, [pixels(95)])


@pytest.mark.parametrize("arch", ["llama"])
def test_a_model_of_text_takes_none(make_engine, arch):
    harness = make_engine(model=arch)
    assert harness.capacity.image_token_id is None
    with pytest.raises(RequestError, match="this worker's model takes text only"):
        harness.ask([1, 2, 3], multimodal=msgspec.json.encode(Multimodal(items=())))


def test_a_release_without_handles_for_the_model_serves_its_text(models, profile, monkeypatch, caplog):
    monkeypatch.setattr("tensorrt_llm._pictures._ARCHITECTURES", ())
    deployment = picture_harness.Deployment(models("llava_next").path, "agg")
    try:
        decode = deployment.engines["decode"]
        assert (decode.capacity.image_token_id, decode.capacity.encodes_images) == (None, False)
        assert "pictures_not_taken" in caplog.text
        assert decode.tokens(WORDS[1])
    finally:
        deployment.close()


def test_one_process_for_all_is_refused_where_an_encoder_is_elsewhere_as_well(monkeypatch):
    """Prefill and decode make handles, too, which TensorRT-LLM's worker opens."""
    from bireme.engines.trtllm.pictures import load_tower

    assert load_tower(SimpleNamespace(hosts_encoder=False)) is None
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    with pytest.raises(ConfigError, match="can't be opened by the process that made them"):
        load_tower(SimpleNamespace(hosts_encoder=False))


def test_hashes_are_spelled_so_that_events_name_what_routers_compute():
    from bireme.engines.trtllm.pictures import hash_numbers

    digest = bytes(range(1, 33))
    spelled = b"".join(number.to_bytes(4, "big", signed=True) for number in hash_numbers(digest.hex())).hex()
    assert int(spelled[:16], 16) == hashing.MediaSpan(0, 1, digest).event_hash
    assert len(spelled) == 64 and spelled[16:] == digest[8:].hex()
