"""docs/tensorrtllm_backend.md: keys, tensors and metrics that it names exist, and it leaves no parameter out."""

from __future__ import annotations

import re

import msgspec
import pytest

from bireme import specs
from bireme.config import CHECKOUT, EngineConfig, Recipe, WorkerEntry
from bireme.engines.trtllm import contract
from bireme.engines.trtllm.config import FOREIGN, OWN
from bireme.launch.recipe_check import check_folder
from bireme.metrics import TABLE
from tests.engines.trtllm.test_docs import classes_of

PAGE = (CHECKOUT / "docs" / "tensorrtllm_backend.md").read_text()
# All that config.pbtxt of the five models of all_models/inflight_batcher_llm asks for (docs/model_config.md there).
PARAMETERS = """
    triton_backend triton_max_batch_size decoupled_mode max_queue_delay_microseconds max_queue_size engine_dir
    batching_strategy encoder_input_features_data_type logits_datatype encoder_engine_dir max_attention_window_size
    sink_token_length exclude_input_in_output cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms
    iter_stats_max_iterations request_stats_max_iterations normalize_log_probs gpu_device_ids participant_ids num_nodes
    gpu_weights_percent max_tokens_in_paged_kv_cache kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction
    kv_cache_host_memory_bytes kv_cache_onboard_blocks enable_kv_cache_reuse lora_cache_optimal_adapter_size
    lora_cache_max_adapter_size lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir
    max_beam_width decoding_mode enable_chunked_context multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode
    cuda_graph_cache_size batch_scheduler_policy medusa_choices eagle_choices lookahead_window_size lookahead_ngram_size
    lookahead_verification_set_size guided_decoding_backend tokenizer_dir xgrammar_tokenizer_info_path
    speculative_decoding_fast_logits prompt_embedding_table_data_type executor_worker_path enable_trt_overlap
    gpt_model_type gpt_model_path encoder_model_path FORCE_CPU_ONLY_INPUT_TENSORS preprocessing_instance_count
    postprocessing_instance_count bls_instance_count accumulate_tokens tensorrt_llm_model_name
    tensorrt_llm_draft_model_name add_special_tokens skip_special_tokens multimodal_model_path hf_model_path
""".split()


def tables():
    """Return for each table of the page its rows, the head's first, as lists of cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", PAGE, re.M)
    return [[line.strip("| ").split(" | ") for line in block.splitlines() if "|---" not in line] for block in blocks]


def table(first, second):
    (found,) = [rows for rows in tables() if rows[0][0] == first and rows[0][1].startswith(second)]
    return found[1:]


def spans(text):
    return re.findall(r"`([^`]+)`", text)


def keys_of(rows):
    """Return (key, whether one release alone has it) of the second column."""
    return [
        (key, "only" in row[1]) for row in rows for key in spans(row[1]) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key)
    ]


KEYS = [*keys_of(table("parameter", "becomes")), *keys_of(table("option", "becomes"))]


def has_field(kind, path):
    """Whether a dotted path is a field of a struct of the recipe."""
    name, _, rest = path.partition(".")
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return name in fields and (not rest or has_field(fields[name], rest))


def is_recipe_key(key):
    if worker := re.fullmatch(r"workers\.(\w+)(?:\.(\w+))?", key):
        return worker[1] in {spec.name for spec in specs.STAGES} and (
            worker[2] is None or has_field(WorkerEntry, worker[2])
        )
    return has_field(Recipe, key)


def releases_with(key):
    """Return the releases whose LlmArgs, or bireme itself, have an engine YAML's key."""
    if tuple(key.split(".")) in OWN and has_field(EngineConfig, key):
        return set(contract.PROFILES)
    return {release for release in contract.PROFILES if is_in(release, key)}


def is_in(release, key):
    names = {"LlmArgs"}
    for part in key.split("."):
        known = [contract.all_fields(name, release) for name in names]
        types = [fields[part].type for fields in known if part in fields and fields[part].exists_in(release)]
        if not types:
            return False
        names = {name for one in types for name in classes_of(one.class_name)}
    return True


@pytest.mark.parametrize(("key", "is_of_one_release"), sorted(set(KEYS)))
def test_what_a_parameter_becomes_is_a_key_of_every_release_that_is_named(key, is_of_one_release):
    name = key.removeprefix("engine_config.")
    if name == key:
        assert is_recipe_key(key)
    else:
        assert len(releases_with(name)) == (1 if is_of_one_release else len(contract.PROFILES)), releases_with(name)


def test_no_parameter_of_that_backend_is_left_out():
    named = {name for row in table("parameter", "becomes") for name in spans(row[0])}
    assert named == set(PARAMETERS)


def test_the_recipe_of_the_page_is_a_good_one(tmp_path):
    recipe, engine = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "decode.yaml").write_text(engine)
    assert check_folder(tmp_path) == []


@pytest.mark.parametrize("title", ["`tensorrt_llm`, input", "llmapi, input"])
def test_tensors_that_a_client_is_led_to_are_inputs_of_generate(title):
    inputs = {tensor.name for tensor in specs.GENERATE.inputs}
    outputs = {tensor.name for tensor in specs.GENERATE.outputs}
    others = {"chat", "prefill", "decode", "disaggregated_params"}
    for row in table(title, "`generate`"):
        same = spans(row[0]) if row[1].startswith("the same") else []
        assert {*same, *spans(row[1])} <= inputs | outputs | others, row


def test_tensors_and_models_that_clients_keep_exist():
    known = {tensor.name for tensor in (*specs.ENSEMBLE.inputs, *specs.ENSEMBLE.outputs)}
    (kept,) = re.findall(r"^For `ensemble` and.*?\n\n", PAGE, re.M | re.S)
    words = {word for word in spans(kept) if not re.search(r"[/.\s]", word)} - {"generate_stream"}
    assert words <= known | specs.MODELS.keys(), words
    models = {name for row in table("called", "here") for name in spans(row[1]) if re.fullmatch(r"[a-z_]+", name)}
    assert models <= specs.MODELS.keys()


def test_metrics_exist():
    rows = table("`nv_trt_llm_...`", "here")
    assert {name for row in rows for name in spans(row[1])} <= TABLE.keys()


def test_model_yaml_s_own_keys_are_none_of_an_engine_yaml():
    keys = {spans(row[0])[0] for row in table("key", "becomes")}
    assert keys == {"model", "triton_config", "logits_post_processors"} and "model" in FOREIGN
    assert all(not releases_with(key) for key in keys - {"model"})
    assert releases_with("backend") == set(contract.PROFILES)
