"""On the fused decoder a head drafts in rounds of one launch what its passes draft one by one, and changes no token: on
a GPU by graphs and kernel by kernel, elsewhere in Triton's interpreter.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.eagle_rounds import _graphs_of
from bireme.engines.torch.forward.sized_graphs import MOST_MISSES
from bireme.engines.torch.weights.eagle_bytes import KEPT_BYTES, EagleWidths, gpu_bytes, places_of
from bireme.settings import SpeculativeConfig
from tests.engines.torch import tiny_models
from tests.engines.torch.eagle_heads import make_tensors, write_head
from tests.engines.torch.known_answers import WholeDrafts
from tests.engines.torch.test_fused_drafts import make_graphs, steps_of
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytestmark = pytest.mark.usefixtures("few_programs")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BASE = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "eos_token_id": 2,
}  # fmt: skip
SETTINGS = {"max_batch_size": 4, "max_num_tokens": 32, "tokens_per_block": 8, "max_seq_len": 128, "max_tokens": 512}
PROMPTS = make_prompts(11, 3, 18, seed=5)
ASKED = [
    request([1 + token % 49 for token in PROMPTS[0]], 16),
    request([1 + token % 49 for token in PROMPTS[1]], 12, temperature=0.9, seed=4, top_p=0.9),
    request([1 + token % 49 for token in PROMPTS[2]], 14, temperature=1.2, seed=8, logit_bias={7: 2.0}),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}
    return tiny_models.save(folder / "base", "llama", **BASE), write_head(folder / "head", make_tensors(), **taps)


def open_engine(base, **settings):
    model, head = base
    config = SpeculativeConfig(decoding_type="Eagle3", max_draft_len=3, speculative_model=str(head))
    engine = Harness(model, **SETTINGS | settings, speculative_config=config)
    engine.core._parts.speculation.lengths = WholeDrafts()
    return engine


def answered(engine, requests):
    """Return what is said, and each draft by prompt and place."""
    speculation, seen = engine.core._parts.speculation, {}
    propose = speculation.drafter.propose

    def watched(most, budget):
        found = propose(most, budget)
        for one, draft in found.items():
            seen[tuple(one.tokens[: one.num_prompt]), len(one.tokens)] = draft.tokens
        return found

    speculation.drafter.propose = watched
    tokens = engine.run(requests)
    speculation.drafter.propose = propose
    assert speculation.is_on and engine.manager.num_referenced == 0
    return tokens, {at: list(drafted) for at, drafted in seen.items()}  # by then the GPU has drawn them


class SeldomDrafts(WholeDrafts):
    """One step in eight has some."""

    num_steps = 0

    def choose(self, plan, offers):
        self.num_steps += 1
        return super().choose(plan, offers) if self.num_steps % 8 == 0 else {}


class Recordable(TorchDispatchMode):
    """Refuses what can't be recorded as a graph: values that come to the host, and sizes that depend on them."""

    REFUSED = {
        "item",
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_consecutive",
        "is_nonzero",
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.REFUSED, name
        found = function(*args, **(kwargs or {}))
        given = next((one for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)), None)
        for one in tree_leaves(found):
            assert given is None or not torch.is_tensor(one) or one.device == given.device, f"{name} leaves the device"
        return found


def refused(engine):
    """Return why steps that keep layers' outputs, and a round, can't be recorded."""
    forward, failed = engine.core._parts.forward, []
    rounds = forward.rounds

    def record():
        try:
            for steps, size in ((forward.resident, 2), (forward.verifying, 4), (forward.mixed, 64), (rounds, 2)):
                steps.tell_nothing(size)
                with torch.inference_mode(), Recordable():
                    steps.compute(size, *([3] if steps is rounds else []))
        except Exception as error:
            failed.append(error)

    engine.engine._post(record)
    engine.settle()
    return failed


def test_steps_of_rows_that_nobody_has_tell_something_where_padding_has_no_embedding(base, tmp_path, monkeypatch):
    """By their logits graphs are compared, and zeros are no measure."""
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    model, head = shutil.copytree(base[0], tmp_path / "base"), base[1]
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][0] = 0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with open_engine((model, head)) as engine:
        forward, least = engine.core._parts.forward, []

        @torch.inference_mode()
        def look():
            one_pass = forward.rounds._passes[0]
            for steps, size in ((forward.resident, 2), (forward.verifying, 4), (forward.mixed, 64), (one_pass, 2)):
                steps.tell_nothing(size)
                least.append(float(steps.compute(size).abs().amax(1).min()))

        engine.engine._post(look)
        engine.settle()
        assert len(least) == 4 and min(least) > 0


def check_memory(engine):
    """What rounds and places hold was counted; of 8B's shape 257 slots of 64 places would take 400 MB."""
    forward, limits = engine.core._parts.forward, engine.core._parts.limits
    rounds, tapped = forward.rounds, forward.tapped
    held = [rounds._whole, rounds.logits, rounds._scratch.partial, rounds._scratch.weights, tapped._fixed]
    over = max(0, tapped.places.rows.nbytes - KEPT_BYTES)
    assert sum(one.nbytes for one in held) + over <= gpu_bytes(rounds._head.shape.widths, limits, 4)
    wide, of_8b = EagleWidths(4096, 4096, 4096, 2048, 128256, 32000), replace(limits, max_batch_size=256)
    assert 250 << 20 < places_of(of_8b, 3 * 4096 * 2) * 257 * 3 * 4096 * 2 <= 257 << 20
    assert 200 << 20 < gpu_bytes(wide, of_8b, 2) < 600 << 20


def test_a_round_drafts_what_passes_draft_one_by_one_and_steps_say_what_they_say_without(base, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with open_engine(base, enable_block_reuse=False) as engine:
        speculation, passes = engine.core._parts.speculation, engine.core._parts.speculation.drafter._passes
        assert {"resident", "verify", "mixed"} <= set(engine.capacity.step_paths)
        rounds, speculation.is_on = passes.rounds, False
        expected = engine.run(ASKED)
        assert "verify" not in steps_of(engine)
        speculation.is_on = True
        tokens, at_once = answered(engine, ASKED)
        assert rounds is not None and tokens == expected and steps_of(engine)["verify"] > 8
        passes.rounds = None
        tokens, by_passes = answered(engine, ASKED)
        both = at_once.keys() & by_passes.keys()  # a prompt may have joined one step later
        assert tokens == expected and len(both) > 12 and all(at_once[at] == by_passes[at] for at in both)
        assert {len(tokens) for tokens in at_once.values()} == {1, 2, 3}
        assert not refused(engine)
        check_memory(engine)


def test_of_whom_much_is_unseen_the_head_catches_up_before_a_round(base, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with open_engine(base, enable_block_reuse=False) as engine:
        speculation, seen = engine.core._parts.speculation, []
        asked = [*ASKED[:2], request([1 + token % 49 for token in PROMPTS[2]], 14, temperature=1.2, seed=8)]
        speculation.lengths, drafter = SeldomDrafts(), speculation.drafter
        see = drafter._catch_up
        monkeypatch.setattr(drafter, "_catch_up", lambda some: (seen.append(len(some)), see(some)), raising=False)
        tokens, at_once = answered(engine, asked)
        drafter._passes.rounds, speculation.lengths = None, SeldomDrafts()
        expected, by_passes = answered(engine, asked)
        both = at_once.keys() & by_passes.keys()
        assert seen and tokens == expected and both and all(at_once[at] == by_passes[at] for at in both)


def test_an_engine_of_one_sequence_at_a_time_has_rounds(base, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with open_engine(base, max_batch_size=1) as engine:
        assert engine.core._parts.forward.rounds is not None
        assert answered(engine, ASKED[1:2])[1] and steps_of(engine)["verify"]


def test_what_a_round_takes_whose_graph_is_still_to_be_made_is_no_price_of_later_ones(base, monkeypatch):
    """Else an engine that is never idle would find that drafts don't pay, and never make it."""
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with open_engine(base, max_batch_size=1) as engine:
        rounds, costs = engine.core._parts.forward.rounds, engine.core._parts.speculation.drafter.costs
        rounds._graphs = [_graphs_of(each, rounds._sizes) for each in rounds._passes]
        (size,) = rounds._sizes
        engine.run(ASKED[1:2])
        assert costs.at_once.num_landed == 0
        for graphs in rounds._graphs:
            graphs._misses[size] = MOST_MISSES - 1  # the next one makes it, or finds that it can't
        engine.run(ASKED[1:2])
        assert costs.at_once.num_landed > 0


def test_preempted_requests_and_cached_prefixes_go_on_with_rounds(base, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    queue = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    with open_engine(base, queue=queue, max_tokens=64) as engine:
        speculation = engine.core._parts.speculation
        speculation.is_on = False
        expected = engine.run(ASKED)
        speculation.is_on = True
        for _ in range(2):
            tokens, drafts = answered(engine, ASKED)
            assert tokens == expected and len(drafts) > 8
        assert engine.core.scheduler.num_preemptions > 0


@needs_gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_on_a_gpu_batches_of_all_sizes_say_with_graphs_what_they_say_without_drafts(base, graphs):
    """Each graph is made, so that rounds and steps of each size are replayed; each number of streams is asked for."""
    settings = {"max_batch_size": 20, "max_num_tokens": 256, "max_tokens": 4096}
    prompts = make_prompts(*range(3, 43, 2), seed=9)
    asked = [
        request([1 + token % 49 for token in prompt], 40, **({"temperature": 1.0, "seed": at} if at % 2 else {}))
        for at, prompt in enumerate(prompts)
    ]
    with open_engine(base, **settings, **({} if graphs else {"cuda_graph_config": None})) as engine:
        make_graphs(engine)
        speculation, rounds = engine.core._parts.speculation, engine.core._parts.forward.rounds
        made = [len(each.made) for each in rounds._graphs]
        assert made == [len(rounds._sizes)] * 3 if graphs else not any(made)
        for count in (1, 2, 3, 5, 8, 13, 20):
            speculation.is_on = False
            expected = engine.run(asked[:count])
            speculation.is_on = True
            tokens, drafts = answered(engine, asked[:count])
            assert tokens == expected and len(drafts) > 8 * count
        steps = steps_of(engine)
        # Without graphs there are no mixed steps, and prompts take the fused path.
        assert steps["verify"] > 50 and (not graphs or steps.get("fused", 0) < 5)
