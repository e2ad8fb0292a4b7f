"""An engine process tells routers what it holds, where the recipe has routers that ask."""

from __future__ import annotations

import pytest

from bireme.config import EngineConfig, KvCacheConfig
from bireme.discovery import run_folder
from bireme.engines.config import with_events
from bireme.errors import ConfigError
from bireme.kv.blocks.hashing import sequence_hashes
from tests.engines.engine_fixtures import PROMPT, Collector, make_request
from tests.kv.publishing.event_readers import VllmSubscriber

TWO = {"router": {"mode": "kv"}}
BLOCKS = {"kv_cache_config": {"tokens_per_block": 16}}


def test_the_record_names_the_sockets_and_what_was_computed_can_be_read_there(make_recipe, start_client, tmp_path):
    client = start_client(make_recipe(engine=BLOCKS, top=TWO))
    sink = Collector()
    client.submit(make_request(max_tokens=2), sink)
    sink.wait()
    record = run_folder.find(tmp_path / "run", "decode")
    reader = VllmSubscriber(record.event_endpoint, record.replay_endpoint)
    told = [event for _, batch in reader.replay(0) for event in batch.events]
    assert told[-1].block_hashes == sequence_hashes(PROMPT, 16)
    assert record.load_endpoint
    reader.close()


@pytest.mark.parametrize(
    "top, has_load",
    [({}, False), ({"router": {"mode": "least_loaded"}}, True), (TWO | {"kv_events": {"enabled": False}}, True)],
)
def test_without_routers_that_ask_for_events_there_are_none(make_recipe, start_client, tmp_path, top, has_load):
    start_client(make_recipe(top=top))
    record = run_folder.find(tmp_path / "run", "decode")
    assert (record.event_endpoint, record.replay_endpoint) == ("", "")
    assert bool(record.load_endpoint) == has_load


def test_an_engine_that_ends_leaves_no_socket(make_recipe, start_client, tmp_path):
    client = start_client(make_recipe(top=TWO))
    assert list((tmp_path / "run").glob("decode-*.e"))
    client.stop()
    assert not list((tmp_path / "run").glob("decode-*.?"))


def test_events_can_be_published_for_others_without_a_choice_to_make(make_recipe):
    recipe = make_recipe(top={"kv_events": {"enabled": True}})
    assert recipe.publishes_events and not recipe.has_kv_routing


def test_a_buffer_that_nobody_reads_is_refused_and_accepted_where_it_is_read(make_recipe):
    engine = {"kv_cache_config": {"event_buffer_max_size": 9}}
    with pytest.raises(ConfigError, match=r"event_buffer_max_size: 9; .* set kv_events.enabled: true"):
        make_recipe(engine=engine)
    recipe = make_recipe(engine=engine, top={"kv_events": {"enabled": True}})
    config = recipe.workers["decode"].engine_config
    assert with_events(config).kv_cache_config.event_buffer_max_size == 9


def test_engines_get_a_buffer_where_events_are_published():
    config = with_events(EngineConfig(llm_args={"kv_cache_config": {"dtype": "fp8"}}))
    assert config.kv_cache_config.event_buffer_max_size == 100_000
    assert config.llm_args["kv_cache_config"] == {"dtype": "fp8", "event_buffer_max_size": 100_000}


def test_without_block_reuse_there_is_nothing_to_tell():
    config = EngineConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    assert with_events(config) == config
