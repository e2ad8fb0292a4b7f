"""Vision-language models: output equal to transformers' generate, whichever process encodes and whichever decodes."""

from __future__ import annotations

import functools
import os
import time

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors

from bireme.config import CacheTransceiverConfig
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.errors import ConfigError, EngineLostError, RequestError, from_message
from bireme.kv.transfer import create_transfer
from bireme.messages import EncodeRequest, EncodeSource
from bireme.metrics import Registry
from tests.engines.torch import picture_models
from tests.engines.torch.picture_deployment import Deployment, png
from tests.engines.torch.picture_models import PLACEHOLDER, WORDS, PictureModel, cases, pixels
from tests.engines.torch.torch_harness import Harness, request
from tests.kv.transfer.needs import needs_nixl

MODES = ("agg", "ep-d", "e-p-d")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    return functools.cache(lambda name: PictureModel(tmp_path_factory.mktemp(name), getattr(picture_models, name)))


@pytest.fixture(scope="module")
def deployments(models):
    made = {}

    def get(name, mode):
        if (name, mode) not in made:
            made[name, mode] = Deployment(models(name).path, mode)
        return made[name, mode]

    yield get
    for deployment in made.values():
        deployment.__exit__()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl"])
def test_output_equals_generate(models, deployments, name, mode):
    model, deployment = models(name), deployments(name, mode)
    for ids, pictures in cases(model):
        expanded = deployment.prepare(ids, pictures)[0]
        assert deployment.run(ids, pictures) == model.generate(expanded, pictures, 24)


@needs_nixl
def test_output_over_nixl_equals_generate(models, tmp_path):
    model, registries = models("llava"), []

    def transfer_of(worker):
        registries.append(Registry(worker))
        config, metrics = CacheTransceiverConfig(), registries[-1]
        transfer = create_transfer("NIXL", run_dir=tmp_path, worker=worker, life=1, config=config, metrics=metrics)
        address = {"pid": os.getpid(), "host": host_id(), "transfer_endpoint": transfer.endpoint}
        run_folder.publish(tmp_path, WorkerRecord(worker=worker, life=1, **address))
        return transfer

    with Deployment(model.path, "e-p-d", transfer_of) as deployment:
        for ids, pictures in cases(model):
            expanded = deployment.prepare(ids, pictures)[0]
            assert deployment.run(ids, pictures) == model.generate(expanded, pictures, 24)
    moved = [name for registry in registries for name, *_ in registry.take_delta().counters]
    assert "bireme_kv_transfer_bytes_total" in moved


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_requests_with_and_without_pictures_at_once_equal_their_solo_outputs(models, deployments, name):
    model, deployment = models(name), deployments(name, "agg")
    mixed = [*cases(model), *cases(model)]
    alone = [deployment.run(ids, pictures) for ids, pictures in mixed]
    together = [deployment.begin(ids, pictures) for ids, pictures in mixed]
    assert [result.finish.error for result in together] == [""] * len(mixed)
    assert [result.tokens for result in together] == alone


def test_a_request_that_goes_on_after_a_loss_equals_one_that_was_never_lost(models, deployments):
    """Decode computes prompt and resumed tokens itself, with embeddings from the encoder."""
    model, deployment = models("qwen2_5_vl"), deployments("qwen2_5_vl", "e-p-d")
    ids, pictures = cases(model)[2]
    whole = deployment.run(ids, pictures)
    prompt, handles, _ = deployment.prepare(ids, pictures)
    asked = request([*prompt, *whole[:7]], 24, num_resumed=7, multimodal=handles)
    result = deployment._submit("decode", asked)
    assert (result.finish.error, result.tokens) == ("", whole[7:])


def test_a_prompt_that_was_preempted_is_computed_again_with_its_pictures(models):
    model = models("llava")
    mixed = cases(model)
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    with Deployment(model.path, "agg", max_tokens=192, queue=policy) as tight, Deployment(model.path, "agg") as roomy:
        expected = [roomy.run(ids, pictures, 60) for ids, pictures in mixed]
        results = [tight.begin(ids, pictures, 60) for ids, pictures in mixed]
        assert [result.finish.error for result in results] == [""] * len(mixed)
        assert [result.tokens for result in results] == expected
        assert tight.engines["decode"].core.scheduler.num_preemptions > 0


def test_the_encoder_loads_the_vision_tower_and_not_the_language_model(models, deployments):
    model = models("llava")
    deployments("llava", "e-p-d")
    from bireme.engines.torch.images.vision_tower import load_vision_tower
    from bireme.engines.torch.weights.checkpoint import open_checkpoint

    tower = load_vision_tower(open_checkpoint(model.path), "float32", torch.device("cpu"))
    inner = model.module.model
    expected = sum(p.numel() for part in (inner.vision_tower, inner.multi_modal_projector) for p in part.parameters())
    assert sum(parameter.numel() for parameter in tower.parameters()) == expected


def test_workers_that_encode_elsewhere_drop_the_vision_tower(deployments):
    decode = deployments("llava", "e-p-d").engines["decode"]
    assert decode.core._parts.forward.modules._model.whole.model.vision_tower is None


def test_the_same_picture_shares_kv_and_another_one_does_not(models, deployments):
    deployment, model = deployments("llava", "agg"), models("llava")
    ids = model.prompt(WORDS[2], None, WORDS[2])
    usages = [deployment.begin(ids, [pixels(seed)]).finish.usage for seed in (10, 11, 11, 12)]
    assert [usage.cached_tokens for usage in usages[1:]] == [16, 64, 16]  # blocks of 16; 30 tokens stand before it


def test_the_same_picture_is_encoded_once(models, deployments):
    deployment = deployments("llava", "e-p-d")
    deployment.counter("")
    first, again = deployment.encode([pixels(21)]), deployment.encode([pixels(21), pixels(21)])
    assert {one.hash for one in (*first.pictures, *again.pictures)} == {first.pictures[0].hash}
    assert deployment.counter("bireme_images_encoded_total") == 1


def test_no_lease_is_left(models):
    with Deployment(models("llava").path, "e-p-d") as deployment:
        for ids, pictures in cases(models("llava")):
            deployment.run(ids, pictures)
        _wait(lambda: deployment.num_leases() == 0)
        assert deployment.engines["prefill"].core._parts.pictures.held_bytes == 0


def test_a_handle_is_good_for_one_fetch(models, deployments):
    deployment = deployments("llava", "e-p-d")
    prompt, handles, _ = deployment.prepare(models("llava").prompt(None, WORDS[0]), [pixels(31)])
    asked = request(prompt, 4, multimodal=handles)
    assert deployment._submit("decode", asked).finish.error == ""
    with pytest.raises(EngineLostError, match="send it again"):
        raise from_message(deployment._submit("decode", asked).finish.error)


def test_a_released_handle_frees_its_lease(models):
    with Deployment(models("llava").path, "e-p-d") as deployment:
        answer = deployment.encode([pixels(32)], copies=3)
        assert deployment.num_leases() == 3
        handles = tuple(handle for one in answer.pictures for handle in one.handles)
        deployment.engines[deployment.encoder_name].engine.release(handles)
        _wait(lambda: deployment.num_leases() == 0)


def test_a_forged_handle_is_refused(models, deployments):
    deployment = deployments("llava", "e-p-d")
    prompt, handles, _ = deployment.prepare(models("llava").prompt(None, WORDS[0]), [pixels(33)])
    tree = msgspec.json.decode(handles)
    tree["items"][0]["handle"] = tree["items"][0]["handle"][:-4] + "AAA="
    with pytest.raises(RequestError, match="bad signature"):
        deployment._submit(
            "prefill", request(prompt, request_type="context_only", multimodal=msgspec.json.encode(tree))
        )


def test_a_handle_of_another_picture_is_refused(models, deployments):
    deployment = deployments("llava", "e-p-d")
    ids = models("llava").prompt(None, WORDS[0])
    prompt, handles, _ = deployment.prepare(ids, [pixels(34)])
    tree = msgspec.json.decode(handles)
    tree["items"][0]["hash"] = deployment.encode([pixels(35)]).pictures[0].hash
    with pytest.raises(RequestError, match="another picture"):
        deployment._submit("decode", request(prompt, multimodal=msgspec.json.encode(tree)))


def test_params_of_one_picture_do_not_serve_another(models, deployments):
    deployment, ids = deployments("llava", "e-p-d"), models("llava").prompt(None, WORDS[0])
    prompt, handles, _ = deployment.prepare(ids, [pixels(36)])
    first = deployment._submit("prefill", request(prompt, request_type="context_only", multimodal=handles))
    assert first.finish.error == ""
    _, _, others = deployment.prepare(ids, [pixels(37)])
    with pytest.raises(RequestError, match="another prompt"):
        deployment._submit("decode", request(prompt, request_type="generation_only", multimodal=others), first.exported)


@pytest.mark.parametrize("ids", [[9, PLACEHOLDER, 9], [9, *[PLACEHOLDER] * 16, 9]])
def test_placeholders_without_a_picture_are_refused(deployments, ids):
    with pytest.raises(RequestError, match="placeholders of pictures"):
        deployments("llava", "agg")._submit("decode", request(ids))


def test_computed_embeddings_give_what_the_picture_gives(models, deployments):
    model, deployment = models("llava"), deployments("llava", "e-p-d")
    ids, picture = model.prompt(WORDS[0], None, WORDS[1]), pixels(41)
    values = model.processor(images=[picture], return_tensors="pt", input_data_format="channels_last")
    with torch.inference_mode():
        (rows,) = model.module.model.get_image_features(values["pixel_values"], return_dict=True).pooler_output
    source = EncodeSource("embeddings", save_tensors({"image": rows.contiguous()}))
    assert deployment.run(ids, [source]) == deployment.run(ids, [picture])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x08\0\0\0\0\0\0\0{garbage", "not a safetensors file"),
        (save_tensors({"a": torch.zeros(3, 63)}), "of shape"),
        (save_tensors({"a": torch.zeros(3, 64), "b": torch.zeros(3, 64)}), "2 tensors"),
        (save_tensors({"a": torch.full((3, 64), float("nan"))}), "NaN"),
        (save_tensors({"a": torch.zeros(3, 64, dtype=torch.int32)}), "float32"),
        (save_tensors({"a": torch.zeros(3, 64), "image_grid_thw": torch.tensor([1, 2, 6])}), "takes no"),
    ],
)
def test_wrong_embeddings_are_refused(deployments, content, message):
    job = EncodeRequest(sources=(EncodeSource("embeddings", content),))
    finish = deployments("llava", "e-p-d").submit_encode(job).finish
    assert finish.error.startswith("INVALID_ARGUMENT: images[0]: embeddings: ") and message in finish.error


def test_a_broken_picture_is_named_and_fails_alone(deployments):
    deployment = deployments("llava", "e-p-d")
    bad = EncodeRequest(sources=(png(pixels(51)), EncodeSource("image", b"\x89PNG\r\n\x1a\nrest")))
    good = EncodeRequest(sources=(png(pixels(52)),))
    results = [deployment.submit_encode(job) for job in (bad, good)]
    assert results[0].finish.error.startswith("INVALID_ARGUMENT: images[1]: the PNG picture is damaged")
    assert results[1].finish.reason == "stop"


def test_embeddings_that_would_exceed_the_limit_are_refused(models, deployments):
    deployment = deployments("llava", "agg")
    store = deployment.engines["decode"].core._parts.pictures
    prompt, handles, _ = deployment.prepare(models("llava").prompt(None, WORDS[0]), [pixels(61)])
    store._max_held_bytes, before = 16 * 64 * 4 - 1, store._max_held_bytes
    try:
        with pytest.raises(Exception, match="max_held_bytes"):
            deployment._submit("decode", request(prompt, 4, multimodal=handles))
    finally:
        store._max_held_bytes = before


def test_embeddings_that_the_gpu_has_no_room_for_end_their_request(models, deployments, monkeypatch):
    deployment = deployments("llava", "agg")
    store = deployment.engines["decode"].core._parts.pictures
    prompt, handles, _ = deployment.prepare(models("llava").prompt(None, WORDS[0]), [pixels(62)])

    def tensor(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_tensor", tensor)
        error = deployment._submit("decode", request(prompt, 4, multimodal=handles)).finish.error
    assert error.startswith("RESOURCE_EXHAUSTED: images: ") and error.endswith("Tried to allocate 2 GiB.")
    assert store.held_bytes == 0
    assert deployment.run(models("llava").prompt(None, WORDS[0]), [pixels(62)], 4)


def test_a_vision_tower_that_is_not_supported_is_refused_by_name(models, tmp_path):
    import shutil

    folder = shutil.copytree(models("llava").path, tmp_path / "model")
    tree = msgspec.json.decode((folder / "config.json").read_bytes())
    tree["architectures"] = ["Idefics3ForConditionalGeneration"]
    (folder / "config.json").write_bytes(msgspec.json.encode(tree))
    with pytest.raises(ConfigError, match="Idefics3ForConditionalGeneration: not supported by the torch engine"):
        Harness(str(folder))


def test_a_text_model_takes_no_picture(tiny):
    with Harness(tiny("llama").path) as harness:
        assert harness.capacity.image_token_id is None


def _wait(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pictures_have_positions_of_their_own_length():
    from bireme.engines.torch.step import SequencePictures
    from bireme.multimodal.mrope import rope_positions
    from bireme.multimodal.wire import OpenedItem

    items = (OpenedItem("0" * 64, 6, 2, (1, 4, 6), None),)
    pictures = SequencePictures(items, rope_positions(10, items, 2))
    assert np.array_equal(pictures.positions(9, 12), np.broadcast_to([6, 7, 8], (3, 3)))
