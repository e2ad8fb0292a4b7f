from __future__ import annotations

import json
import logging
import re

import pytest
import yaml

from bireme import config
from bireme.config import CHECKOUT, Recipe, missing_worker
from bireme.conversion import convert
from bireme.errors import ConfigError
from bireme.recipe_files import deep_merge, load_recipe

DECODE = "workers: {decode: {engine: mocker}}\n"
READY = {"cache_transceiver_config": {"backend": "DEFAULT"}}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("BIREME_RECIPE", "BIREME_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path):
    """Write recipe.yaml (and engine YAMLs by name) and return the folder."""

    def write(text, **engines):
        folder = tmp_path / "galley"
        folder.mkdir(exist_ok=True)
        if isinstance(text, dict):
            text = json.dumps({"model": "org/model"} | text)
        elif isinstance(text, str):
            text = "model: org/model\n" + text
        (folder / "recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        for name, content in engines.items():
            (folder / f"{name}.yaml").write_text(content)
        return folder

    return write


def disaggregated(prefill=None, decode=None, **more):
    """Return a recipe of both stages; the arguments are added to their engine configs."""
    workers = {
        name: {"engine": "mocker", "engine_config": READY | (own or {})}
        for name, own in (("prefill", prefill), ("decode", decode))
    }
    return {"workers": workers} | more


def refusal(folder, override=""):
    with pytest.raises(ConfigError) as caught:
        load_recipe(folder, override)
    return str(caught.value)


# what is read


def test_defaults_hold_where_the_recipe_is_silent(write):
    recipe = load_recipe(write(DECODE))
    assert recipe.entry("decode").engine_config == config.EngineConfig()
    assert (recipe.limits, recipe.name) == (config.Limits(), "galley")


def test_an_engine_yaml_is_read_from_beside_the_recipe(write):
    recipe = load_recipe(write("workers: {decode: {engine_config: a.yaml}}", a="max_batch_size: 3"))
    assert recipe.entry("decode").engine_config.max_batch_size == 3


def test_an_empty_engine_yaml_means_the_defaults(write):
    recipe = load_recipe(write("workers: {decode: {engine_config: a.yaml}}", a=""))
    assert recipe.entry("decode").engine_config == config.EngineConfig()


def test_the_override_wins_over_recipe_and_engine_yaml_key_by_key(write):
    engine = "max_batch_size: 3\nkv_cache_config: {tokens_per_block: 16, max_tokens: 64}"
    override = {"workers": {"decode": {"engine_config": {"kv_cache_config": {"max_tokens": 128}}}}}
    recipe = load_recipe(write("workers: {decode: {engine_config: a.yaml}}", a=engine), json.dumps(override))
    settings = recipe.entry("decode").engine_config
    assert settings.max_batch_size == 3
    assert (settings.kv_cache_config.tokens_per_block, settings.kv_cache_config.max_tokens) == (16, 128)


def test_the_override_may_name_an_engine_yaml(write):
    folder = write(DECODE, b="max_batch_size: 5")
    recipe = load_recipe(folder, '{"workers": {"decode": {"engine_config": "b.yaml"}}}')
    assert recipe.entry("decode").engine_config.max_batch_size == 5


def test_recipe_and_override_come_from_the_environment(write, monkeypatch):
    monkeypatch.setenv("BIREME_RECIPE", str(write(DECODE)))
    monkeypatch.setenv("BIREME_OVERRIDE", '{"limits": {"max_n": 2}}')
    assert load_recipe().limits.max_n == 2


def test_each_replaced_scalar_is_logged(caplog):
    caplog.set_level(logging.INFO, "bireme.recipe_files")
    deep_merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    assert "override key=a.b old=1 new=3" in caplog.text and "a.c" not in caplog.text


def test_deep_merge_replaces_lists_whole_and_blocks_by_scalars():
    base = {"list": [1, 2], "block": {"a": 1}, "kept": 0}
    deep_merge(base, {"list": [3], "block": None, "new": {"x": 1}})
    assert base == {"list": [3], "block": None, "kept": 0, "new": {"x": 1}}


# replicas


def test_the_first_replica_keeps_the_plain_name(write):
    recipe = load_recipe(write("workers: {decode: {engine: mocker, replicas: 3}}"))
    assert recipe.replicas("decode") == ("decode", "decode_1", "decode_2")
    assert recipe.replicas("prefill") == ()
    assert recipe.entry("decode_2") is recipe.entry("decode")
    assert recipe.entry("prefill") is None


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("decode", "decode"),
        ("decode_12", "decode"),
        ("multimodal_encoder", "multimodal_encoder"),
        ("decode@node_7:8001", "decode"),
        ("prefill_1@[::1]:8001", "prefill"),
    ],
)
def test_the_stage_of_a_worker(name, stage):
    assert config.stage_of(name) == stage


@pytest.mark.parametrize(("name", "server"), [("decode_1", ""), ("decode", "node_7:8001"), ("prefill", "[::1]:8001")])
def test_a_worker_s_id_tells_its_model_and_its_server(name, server):
    assert config.split_worker(config.worker_id(name, server)) == (name, server)


# what can't be read


def test_a_recipe_that_is_not_there_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"no recipe at recipes/tinny .*did you mean recipes/tiny\?"):
        load_recipe("recipes/tinny")


def test_a_recipe_unlike_any_other_lists_what_there_is():
    with pytest.raises(ConfigError, match="known recipes: .*mocker.*tiny"):
        load_recipe("recipes/zzzzzzzz")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a: [", "not valid YAML"),
        (b"a: 2025-06-31", "not valid YAML: day"),
        (b"a: " + b"[" * 1000, "not valid YAML"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"- 1", "a mapping is expected at the top, not list"),
        (b"", "missing required field `model`"),
        (b"model: m", "missing required field `workers`"),
    ],
)
def test_a_broken_recipe_names_its_file_and_the_reason(write, text, reason):
    message = refusal(write(text))
    assert "recipe.yaml: " in message and reason in message


def test_a_missing_engine_yaml_is_named(write):
    assert refusal(write("workers: {decode: {engine_config: nope.yaml}}")).endswith("nope.yaml does not exist")


def test_an_engine_yaml_that_is_a_folder_is_named(write):
    folder = write("workers: {decode: {engine_config: sub}}")
    (folder / "sub").mkdir()
    assert "can't be read: Is a directory" in refusal(folder)


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "a JSON object is expected")])
def test_a_broken_override_is_refused(write, text, reason):
    assert f"BIREME_OVERRIDE: {reason}" in refusal(write(DECODE), text)


@pytest.mark.parametrize("key", ["name", "folder"])
def test_name_and_folder_are_not_keys_of_a_recipe(write, key):
    assert f"{key} is the folder's name; remove the key" in refusal(write(DECODE + f"{key}: x"))


# unknown keys and wrong values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker: {}", "unknown key worker; did you mean workers?"),
        ("workers: {decode: {enigne: torch}}", "workers.decode: unknown key enigne; did you mean engine?"),
        (
            "workers: {decode: {engine_config: {kv_cache_config: {tokens_per_blok: 3}}}}",
            "workers.decode: unknown key engine_config.kv_cache_config.tokens_per_blok; did you mean tokens_per_block?",
        ),
        (DECODE + "limits: {max_nn: 1}", "unknown key limits.max_nn; did you mean max_n?"),
        (DECODE + "pipeline: {zzzz: 1}", "unknown key pipeline.zzzz; known keys: enforce_disaggregation, "),
    ],
)
def test_an_unknown_key_suggests_the_nearest_or_lists_all(write, text, expected):
    assert expected in refusal(write(text))


def test_a_worker_s_instances_are_told_to_be_no_more_with_the_remedy(write):
    message = refusal(write("workers: {decode: {instances: 2}}"))
    assert "workers.decode.instances: " in message and "pipeline.instances.generate" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workers: [decode]", "workers: ['decode']; Expected `object`"),
        ("workers: {decode: 3}", "workers.decode: Expected `object`, got `int`"),
        ("workers: {decode: {engine: torhc}}", "workers.decode: engine: 'torhc'; one of torch, trtllm, mocker"),
        ("workers: {decode: {replicas: two}}", "workers.decode: replicas: 'two'; Expected `int`, got `str`"),
        ("workers: {decode: {num_threads: 0}}", "workers.decode: num_threads: 0; 1 or more"),
        ("workers: {decode: {devices: [-1]}}", "workers.decode: devices[0]: 0 or more"),
        (
            "workers: {decode: {engine_config: {cache_transceiver_config: {backend: RDMA}}}}",
            "cache_transceiver_config.backend: 'RDMA'; one of DEFAULT, SHM, CUDA_IPC, NIXL, UCX, MPI",
        ),
        (
            "workers: {decode: {engine_config: {cache_transceiver_config: {kv_transfer_timeout_ms: 0}}}}",
            "kv_transfer_timeout_ms: 0; 1 or more",
        ),
        (
            "workers: {decode: {engine_config: {kv_cache_config: {free_gpu_memory_fraction: 1}}}}",
            "free_gpu_memory_fraction: 1; less than 1",
        ),
        (DECODE + "limits: {max_n: 1.5}", "limits.max_n: 1.5; Expected `int`, got `float`"),
        (DECODE + "limits: null", "limits: None; Expected `object`, got `null`"),
        (DECODE + "supervisor: {ping_timeout_s: 0}", "supervisor.ping_timeout_s: 0; more than 0"),
        (DECODE + "pipeline: {stall_timeout_s: -1}", "pipeline.stall_timeout_s: -1; more than 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(write, text, expected):
    assert expected in refusal(write(text))


# rules across fields


def test_an_unknown_stage_suggests_the_nearest(write):
    message = refusal(write("workers: {decoder: {}}"))
    assert "workers.decoder: not a stage (prefill, decode, " in message and "did you mean decode?" in message


@pytest.mark.parametrize("replicas", [0, 65])
def test_replicas_are_bounded(write, replicas):
    assert f"workers.decode.replicas: {replicas}; 1 to 64" in refusal(
        write({"workers": {"decode": {"replicas": replicas}}})
    )


def test_prefill_needs_decode(write):
    assert "prefill without decode; add decode" in refusal(write("workers: {prefill: {engine: mocker}}"))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("{embedding: {}, decode: {engine: mocker}}", "workers.embedding: beside decode; a recipe serves one model"),
        ("{embedding: {engine: mocker}}", "workers.embedding.engine: mocker makes no embeddings; set engine: torch"),
    ],
)
def test_an_embedding_model_has_a_recipe_and_an_engine_of_its_own(write, workers, expected):
    assert expected in refusal(write(f"workers: {workers}"))


def test_enforced_disaggregation_needs_prefill(write):
    message = refusal(write(DECODE + "pipeline: {enforce_disaggregation: true}"))
    assert "enforce_disaggregation is true but the recipe has no prefill worker" in message


def test_a_good_disaggregated_recipe_is_accepted(write):
    recipe = load_recipe(write(disaggregated(pipeline={"enforce_disaggregation": True})))
    assert set(recipe.workers) == {"prefill", "decode"}


def test_prefill_and_decode_run_on_the_same_engine(write):
    tree = disaggregated()
    tree["workers"]["prefill"]["engine"] = "torch"
    assert "prefill runs on torch, decode on mocker" in refusal(write(tree))


def test_prefill_and_decode_agree_on_the_kv_dtype(write):
    message = refusal(write(disaggregated(prefill={"kv_cache_config": {"dtype": "fp8"}})))
    assert "decode.engine_config.kv_cache_config.dtype: auto; prefill has fp8" in message and "use one dtype" in message


def test_disaggregation_needs_a_transfer_backend_on_both_sides(write):
    message = refusal(write(disaggregated(decode={"cache_transceiver_config": {}})))
    assert "workers.decode.engine_config.cache_transceiver_config.backend is not set" in message


@pytest.mark.parametrize(
    ("backend", "expected"), [("DEFAULT", "DEFAULT"), ("CUDA_IPC", "DEFAULT"), ("NIXL", "NIXL"), ("UCX", "NIXL")]
)
def test_embeddings_reach_other_hosts_where_kv_does(write, backend, expected):
    own = {"cache_transceiver_config": {"backend": backend}}
    assert load_recipe(write(disaggregated(prefill=own, decode=own))).embedding_backend == expected


@pytest.mark.parametrize("engine", [[], {}])
def test_an_engine_that_is_no_name_is_refused_by_its_key_where_drafts_are_asked_for(write, engine):
    config = {"speculative_config": {"decoding_type": "NGram"}}
    message = refusal(write({"workers": {"decode": {"engine": engine, "engine_config": config}}}))
    assert f"workers.decode: engine: {engine}; one of torch, " in message


def test_a_pool_for_embeddings_is_refused_where_they_go_by_nixl(write):
    own = {"multimodal_config": {"embedding_pool_bytes": 4096}}
    assert load_recipe(write(disaggregated(prefill=own, decode=own)))
    apart = {"cache_transceiver_config": {"backend": "NIXL"}}
    message = refusal(write(disaggregated(prefill=own | apart, decode=apart)))
    assert (
        "workers.prefill.engine_config.multimodal_config.embedding_pool_bytes: 4096; embeddings go by NIXL" in message
    )


@pytest.mark.parametrize("key", ["max_seq_len", "max_input_len"])
def test_the_buffer_holds_the_longest_input(write, key):
    own = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 99}, key: 100}
    message = refusal(write(disaggregated(prefill=own)))
    assert "max_tokens_in_buffer: 99; less than the longest input 100" in message and "workers.prefill" in message


# where the model is


def test_a_hub_id_is_passed_on(write):
    assert load_recipe(write(DECODE)).model_path == "org/model"


def test_a_folder_beside_the_recipe_is_found(write):
    folder = write({"model": "weights", "workers": {"decode": {}}})
    (folder / "weights").mkdir()
    recipe = load_recipe(folder)
    assert recipe.model_path == recipe.tokenizer_path == str(folder / "weights")


@pytest.mark.parametrize(
    ("model", "remedy"), [("models/tiny-none", "run `make models`"), ("/no/model", "check `model`")]
)
def test_a_missing_model_folder_says_what_to_do(write, model, remedy):
    recipe = load_recipe(write({"model": model, "workers": {"decode": {}}}))
    with pytest.raises(ConfigError, match=remedy):
        _ = recipe.model_path


def test_every_recipe_of_the_checkout_loads():
    for path in (config.CHECKOUT / "recipes").glob("*/recipe.yaml"):
        assert load_recipe(path.parent, "").workers


def test_workers_that_share_a_yaml_anchor_change_apart(write):
    text = "workers: {prefill: &w {engine: trtllm, engine_config: {max_batch_size: 8, disable_overlap_scheduler: true,"
    text += " cache_transceiver_config: {backend: UCX}}}, decode: *w}\n"
    override = {"workers": {"decode": {"engine_config": {"max_batch_size": 64}}}}
    workers = load_recipe(write(text), json.dumps(override)).workers
    assert [workers[stage].engine_config.max_batch_size for stage in ("prefill", "decode")] == [8, 64]
    assert workers["decode"].engine_config.llm_args["max_batch_size"] == 64


def test_a_chat_template_lies_beside_the_recipe_or_where_a_variable_says(write, monkeypatch):
    monkeypatch.setenv("TEMPLATES", "/srv/templates")
    paths = []
    for name in ("own.jinja", "$TEMPLATES/own.jinja", ""):
        recipe = load_recipe(write({"workers": {"decode": {"engine": "mocker"}}, "chat": {"template": name}}))
        paths.append(recipe.chat_template)
    assert paths == [f"{recipe.folder}/own.jinja", "/srv/templates/own.jinja", ""]


@pytest.mark.parametrize("engine", ["torch", "trtllm"])
def test_encoder_and_prefill_agree_on_the_dtype_of_embeddings(write, engine):
    ready = {"engine_config": READY | {"dtype": "float32"}}
    workers = {"multimodal_encoder": {"engine": engine}, "prefill": ready, "decode": ready}
    with pytest.raises(ConfigError, match="dtype: multimodal_encoder has auto, prefill float32; embeddings are not"):
        load_recipe(write({"workers": workers}))


@pytest.mark.parametrize(
    ("workers", "stage"),
    [
        (("decode",), "decode"),
        (("prefill", "decode"), "prefill"),
        (("multimodal_encoder", "prefill", "decode"), "multimodal_encoder"),
    ],
)
def test_the_vision_tower_is_as_far_in_front_as_there_are_workers(write, workers, stage):
    recipe = load_recipe(write({"workers": dict.fromkeys(workers, {"engine_config": READY})}))
    assert recipe.encoder_stage == stage


def test_a_model_that_needs_a_worker_which_the_recipe_lacks_is_told_apart():
    videos = convert({"model": "m", "workers": {"video_diffusion": {"engine": "mocker"}}}, Recipe, "test")
    assert missing_worker("generate", videos) == missing_worker("tokenizer", videos) == "decode"
    assert missing_worker("prefill", videos) == "prefill"
    assert missing_worker("video", videos) == missing_worker("logits_processor", videos) == ""


def test_videos_are_asked_for_by_the_recipe_s_name_or_beside_a_language_model_by_their_own():
    video = {"engine": "mocker", "model": "models/tiny-video"}
    alone = convert({"model": "m", "workers": {"video_diffusion": video}, "name": "clips"}, Recipe, "test")
    workers = {"video_diffusion": video, "decode": {"engine": "mocker"}}
    both = convert({"model": "m", "workers": workers, "name": "clips"}, Recipe, "test")
    assert (alone.video_name, both.video_name) == ("clips", "tiny-video")
    assert both.worker_model_path("video_diffusion").endswith("models/tiny-video")


def test_an_alias_within_its_own_block_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: &it\n  inner: *it\n")
    with pytest.raises(ConfigError, match="write the block out"):
        load_recipe(tmp_path, "")


# what the pages say


def test_the_page_on_media_has_every_key_with_its_default():
    block = re.search(r"```yaml\n(media:.*?)```", (CHECKOUT / "docs" / "media.md").read_text(), re.DOTALL)
    keys = yaml.safe_load(block.group(1))["media"]
    assert convert(keys, config.MediaLimits) == config.MediaLimits()
    assert list(keys) == list(config.MediaLimits.__struct_fields__)


def test_the_pages_tables_of_keys_have_the_defaults():
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    blocks = {"limits": config.Limits(), "guided_decoding_config": config.GuidedDecodingConfig()}
    row = re.compile(rf"^\| `({'|'.join(blocks)})\.(\w+)` \| ([\d.]+) ?(\w*) \|", re.MULTILINE)
    found = [match for page in (CHECKOUT / "docs").glob("*.md") for match in row.findall(page.read_text())]
    assert len(found) > 5
    for block, name, number, unit in found:
        assert float(number) * units[unit] == getattr(blocks[block], name)


# metrics


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            "aliases: [vllm, sglang]",
            "metrics.aliases[1]: Invalid enum value 'sglang'; one of triton_trtllm, dynamo, vllm",
        ),
        ("aliases: vllm", "metrics.aliases: "),
        ("max_accounts: -1", "metrics.max_accounts: -1; 0 or more"),
        (
            "buckets: {bireme_queue_second: [1]}",
            "buckets.bireme_queue_second: no histogram of bireme; did you mean bir",
        ),
        ("buckets: {bireme_requests_total: [1]}", "buckets.bireme_requests_total: no histogram of bireme"),
        ("buckets: {trtllm_request_queue_time_seconds: [1]}", "_time_seconds: no histogram of bireme"),
        ("buckets: {bireme_queue_seconds: []}", "buckets.bireme_queue_seconds: 0 bounds; give 1 to 64"),
        (f"buckets: {{bireme_queue_seconds: {list(range(65))}}}", "buckets.bireme_queue_seconds: 65 bounds"),
        ("buckets: {bireme_queue_seconds: [0.1, 2, 1]}", "buckets.bireme_queue_seconds: 1.0 after 2.0; bounds must"),
        ("buckets: {bireme_queue_seconds: [1, 1]}", "buckets.bireme_queue_seconds: 1.0 after 1.0; bounds must"),
        ("buckets: {bireme_queue_seconds: [-1, 1]}", "buckets.bireme_queue_seconds: -1.0; a bound is a finite number"),
        ("buckets: {bireme_queue_seconds: [1, .inf]}", "buckets.bireme_queue_seconds: inf; a bound is a finite number"),
        ("buckets: {bireme_queue_seconds: [.nan]}", "buckets.bireme_queue_seconds: nan; a bound is a finite number"),
        ("buckets: {bireme_queue_seconds: [true]}", "metrics.buckets"),
    ],
)
def test_what_metrics_can_not_be_is_refused_by_file_and_key(write, keys, message):
    refused = refusal(write(f"{DECODE}metrics: {{{keys}}}"))
    assert message in refused and refused.startswith(f"{write(DECODE)}/recipe.yaml: metrics.")


def test_bounds_are_read_as_numbers(write):
    recipe = load_recipe(write(DECODE + "metrics: {buckets: {bireme_queue_seconds: [0, 1, 2.5]}}"))
    assert recipe.metrics.buckets == {"bireme_queue_seconds": (0.0, 1.0, 2.5)}


@pytest.mark.parametrize(
    ("engine", "router", "is_told"),
    [("torch", {}, True), ("torch", {"transfer_ms": 0}, False), ("mocker", {}, False)],
)
def test_two_stages_that_measure_what_prompts_cost_tell_their_load(write, engine, router, is_told):
    engines = {"prefill": {"engine": engine}, "decode": {"engine": engine}}
    recipe = load_recipe(
        write(disaggregated(router=router)), json.dumps({"model": "models/tiny-chat", "workers": engines})
    )
    assert (recipe.routing_mode, recipe.has_load_routing) == ("round_robin", is_told)
