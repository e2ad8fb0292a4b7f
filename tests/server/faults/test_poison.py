"""A request that holds its engine up for ever: it ends with the reason, and nobody who is served beside it."""

from __future__ import annotations

import pytest

from tests.server.faults.test_faults import Run
from tests.server.watch import is_idle, total, until
from tests.servers import start_server

pytestmark = pytest.mark.server

STREAMS, LENGTH = 20, 120
STALL_S = 6.0
TOKEN = 77

PROCESSORS = f"""
import time

class HangsItself:
    def __init__(self, context, /):
        self.until = context.num_prompt_tokens + 10
    def __call__(self, token_ids, logits):
        if len(token_ids) >= self.until:
            time.sleep(3600)

class HangsAStep(HangsItself):
    '''Makes a token whose step has no end.'''
    def __init__(self, context, /):
        super().__init__(context)
        from bireme.engines.torch.forward.forward import Forward
        compute = Forward.compute
        def hang(self, batch):
            if (batch.ids == {TOKEN}).any():
                time.sleep(3600)
            return compute(self, batch)
        Forward.compute = hang
    def __call__(self, token_ids, logits):
        if len(token_ids) >= self.until:
            logits[{TOKEN}] = 1e6
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Return a folder of packages for engines, with processors that behave badly."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "poison.py").write_text(PROCESSORS)
    info = folder / "poison-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poison\nVersion: 1.0\n")
    entries = "hangs_itself = poison:HangsItself\nhangs_a_step = poison:HangsAStep\n"
    (info / "entry_points.txt").write_text(f"[bireme.logits_processors]\n{entries}")
    return folder


@pytest.fixture(scope="module")
def server(sample_model, write_recipe, packages):
    config = {"dtype": "float32", "max_batch_size": 32, "max_seq_len": 512, "kv_cache_config": {"max_tokens": 32768}}
    worker = {"engine": "torch", "num_threads": 1, "replicas": 2, "env": {"PYTHONPATH": str(packages)}}
    keys = {"supervisor": {"stall_timeout_s": STALL_S, "max_restarts": 50}, "pipeline": {"stall_timeout_s": 120}}
    recipe = write_recipe(sample_model("llama"), {"decode": worker | {"engine_config": config}}, **keys)
    with start_server(recipe) as server:
        yield server


@pytest.mark.parametrize(("processor", "most_engines"), [("hangs_itself", 1), ("hangs_a_step", 2)])
def test_poison_ends_with_its_reason_and_takes_no_innocent_stream_along(server, reference, processor, most_engines):
    restarts = total(server, "bireme_engine_restarts_total")
    innocent = Run(server, "generate", count=STREAMS, max_tokens=LENGTH, stream=True)
    until(lambda: all(count > 3 for count in innocent.tokens), 120, "streams under way")
    call = f'[{{"name": "{processor}"}}]'
    (poison,) = Run(server, "generate", count=1, max_tokens=LENGTH, stream=True, logits_processors=call).join()
    expected = [reference("llama").greedy([*range(400, 480), 300 + i], LENGTH) for i in range(STREAMS)]
    assert innocent.join() == expected
    assert "INVALID_ARGUMENT" in str(poison) and "not moved" in str(poison)
    assert total(server, "bireme_engine_restarts_total") - restarts <= most_engines
    until(lambda: is_idle(server), 20, "nothing left behind")
