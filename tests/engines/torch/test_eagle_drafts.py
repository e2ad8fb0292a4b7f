"""An EAGLE-3 head drafts in an engine what its published form says of the model's rows, and changes no token."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.engines.torch.forward.modules import layers_of
from bireme.engines.torch.scheduling.step_costs import StepCosts
from bireme.errors import ConfigError
from bireme.kv.blocks.events import DISK, HOST
from bireme.kv.transfer.host_pool import HostPool
from bireme.settings import SpeculativeConfig
from tests.engines.torch import tiny_models
from tests.engines.torch.eagle_heads import make_tensors, published, write_head
from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.known_answers import WholeDrafts
from tests.engines.torch.test_disaggregated import Pair, transfer_by
from tests.engines.torch.test_tiers import settle
from tests.engines.torch.torch_harness import Harness, request
from tests.kv.transfer.needs import needs_nixl

BASE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 8, "intermediate_size": 48, "eos_token_id": 2}
TAPS = (1, 3, 4)
SAMPLED = {"temperature": 0.8, "seed": 5, "top_p": 0.9}
SETTINGS = {"max_num_tokens": 32, "tokens_per_block": 8}
PROMPTS = [np.random.default_rng(3).integers(3, 50, length).tolist() for length in (1, 7, 30, 45, 16, 70, 12, 33)]

FEW = PROMPTS[2:6]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    return tiny_models.save(folder / "base", "llama", **BASE), write_head(folder / "head")


@pytest.fixture(scope="module")
def expected():
    """Return what the model says, greedily."""
    return tiny_models.generate(tiny_models.build("llama", **BASE), PROMPTS, 32)


def drafting(head, kind="Eagle3"):
    config = SpeculativeConfig(decoding_type=kind, max_draft_len=3, speculative_model=str(head))
    return {"speculative_config": config}


def whole(engine):
    speculation = engine.core._parts.speculation
    speculation.lengths = WholeDrafts()
    return speculation


def first_drafts(tokens):
    """Return what the published head drafts first behind each length of a sequence, from the rows of the model."""
    model, tensors, rows = tiny_models.build("llama", **BASE), make_tensors(), {}
    for tap in TAPS:
        layers_of(model)[tap].register_forward_hook(
            lambda _, __, made, tap=tap: rows.update({tap: made[0] if isinstance(made, tuple) else made})
        )
    with torch.inference_mode():
        model(torch.tensor([tokens]))
        hidden = F.linear(torch.cat([rows[tap].view(len(tokens), -1) for tap in TAPS], -1), tensors["fc.weight"])
        embeddings = model.get_input_embeddings()(torch.tensor(tokens))
        _, logits = published(tensors, embeddings[1:], hidden[:-1])
    ids = logits.argmax(-1)
    return dict(enumerate((ids + tensors["d2t"][ids]).tolist(), 2))


def watched(engine):
    """Have it verify all drafts; return them, by prompt and length of the sequence, as they come."""
    drafter, seen = whole(engine).drafter, {}
    propose = drafter.propose

    def watch(most, budget):
        found = propose(most, budget)
        for one, draft in found.items():
            seen[tuple(one.tokens[: one.num_prompt]), len(one.tokens)] = draft.tokens
        return found

    drafter.propose = watch
    return seen


def assert_published(seen, prompts, answers):
    """All drafts are what a head says that has seen the whole sequence, and hardly a place is without."""
    for prompt, tokens in zip(prompts, answers, strict=True):
        wanted = first_drafts([*prompt, *tokens])
        found = {length: draft[0] for (asked, length), draft in seen.items() if asked == tuple(prompt)}
        assert len(found) > 20 and found == {length: wanted[length] for length in found}


def test_drafts_are_what_the_published_head_says_and_tokens_the_model_s(base, expected):
    model, head = base
    with Harness(model, **SETTINGS, **drafting(head, "Eagle")) as engine:
        assert "modules" not in engine.capacity.step_paths  # a vocabulary of 50 tokens can be compared, too
        seen = watched(engine)
        assert engine.run([request(prompt, 32) for prompt in PROMPTS]) == expected
        assert engine.core._parts.speculation.is_on and engine.manager.num_referenced == 0
    assert_published(seen, PROMPTS, expected)
    assert {len(draft) for draft in seen.values()} == {1, 2, 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")
def test_what_the_head_sees_behind_a_step_is_no_time_of_that_step(base, expected, monkeypatch):
    model, head = base
    with Harness(model, **SETTINGS, **drafting(head)) as engine:
        speculation, costs = whole(engine), StepCosts()
        resident, observe, measured = HostResident.put_into(engine.core._parts), speculation.drafter.observe, []

        def slow(*given):
            time.sleep(0.05)
            return observe(*given)

        speculation.verifying = costs
        monkeypatch.setattr(speculation.drafter, "observe", slow)
        monkeypatch.setattr(costs, "landed", lambda works, seconds: measured.append(seconds))
        assert engine.run([request(FEW[0], 32)]) == expected[2:3]
        assert speculation.is_on and resident.num_verified >= len(measured) > 4
    assert min(measured) > 0


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_a_prefix_that_comes_back_from_a_lower_tier_has_the_head_s_rows(base, expected, tmp_path, tier):
    model, head = base
    tiers = {"host_cache_size": 1 << 20 if tier == HOST else 64 << 10}
    if tier == DISK:
        tiers |= {"disk_cache_size": 1 << 20, "disk_cache_path": str(tmp_path)}
    with Harness(model, max_tokens=104, **tiers, **SETTINGS, **drafting(head)) as engine:
        seen = watched(engine)
        for prompt, answer in [*zip(FEW, expected[2:6], strict=True)] * 2:
            seen.clear()
            assert engine.run([request(prompt, 32)]) == [answer]
            settle(engine)
            assert_published(seen, [prompt], [answer])
        assert engine.manager.tiers.counts.onboarded[tier, 0] > 2


def test_sampled_streams_that_moved_or_share_a_prefix_say_the_same(base):
    model, head = base
    with Harness(model, **SETTINGS) as plain:
        asked = [request(prompt, 24, **SAMPLED) for prompt in FEW]
        tokens = plain.run(asked)
    with Harness(model, **SETTINGS, **drafting(head)) as engine:
        speculation = whole(engine)
        assert engine.run(asked) == tokens
        assert engine.run(asked) == tokens  # their prefixes are cached
        moved = [request(p + own[:9], 24, num_resumed=9, **SAMPLED) for p, own in zip(FEW, tokens, strict=True)]
        assert engine.run(moved) == [own[9:] for own in tokens]
        assert speculation.is_on and sum(one.finish.usage.drafted_tokens for one in engine.results.values()) > 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="steps are started there and not computed by forward.run")
def test_a_step_that_loses_its_largest_request_for_memory_is_seen_as_far_as_it_was_computed(base, monkeypatch):
    model, head = base
    with Harness(model, **(SETTINGS | {"max_num_tokens": 256}), **drafting(head)) as engine:
        speculation, forward = whole(engine), engine.core._parts.forward
        run, begun, starts = forward.run, threading.Event(), threading.Event()

        def run_short_of_memory(plan):
            begun.set()
            starts.wait(60)
            if len(plan.chunks) > 1 and plan.largest is plan.chunks[0][0]:
                raise torch.OutOfMemoryError("pretended")
            return run(plan)

        monkeypatch.setattr(forward, "run", run_short_of_memory)
        held = engine.submit(request([5], 1))
        assert begun.wait(60)
        large, *others = (engine.submit(request(prompt, 8)) for prompt in (PROMPTS[5], PROMPTS[1], PROMPTS[2]))
        starts.set()
        assert "out of memory" in large.finish.error and held.finish.error == ""
        assert [one.finish.error for one in others] == ["", ""] and speculation.is_on


def test_preempted_requests_and_blocks_from_host_memory_say_the_same(base, expected):
    model, head = base
    queue = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    with Harness(model, queue=queue, max_tokens=160, host_cache_size=1 << 22, **SETTINGS, **drafting(head)) as engine:
        speculation = whole(engine)
        for _ in range(2):
            assert engine.run([request(prompt, 32) for prompt in PROMPTS]) == expected
            settle(engine)
        assert engine.core.scheduler.num_preemptions > 0 and speculation.is_on
        assert engine.manager.num_referenced == 0


def imports(engine):
    """Return how many transfers came with a head's rows and without, since the last call."""
    counters = {labels: count for name, labels, count in engine.metrics.take_delta().counters if "head" in name}
    return [counters["decode", rows] for rows in ("whole", "missing")]


@pytest.mark.parametrize("sizes", [(16, 8), (8, 32)])
def test_behind_a_prefill_worker_with_the_head_drafts_are_those_of_one_engine(base, expected, sizes):
    model, head = base
    with Pair(model, *sizes, max_num_tokens=32, **drafting(head)) as pair:
        seen = watched(pair.decode)
        for _ in range(2):  # the second time decode holds what it has had, and prefill has seen it
            seen.clear()
            assert pair.run(PROMPTS, max_tokens=32) == expected
            assert_published(seen, PROMPTS, expected)
        seen.clear()
        assert pair.decode.run([request(prompt, 32) for prompt in PROMPTS]) == expected
        assert_published(seen, PROMPTS, expected)
        for prompt, answer in zip(FEW, expected[2:6], strict=True):  # a stream that moved
            moved, more = prompt + answer[:9], {"max_tokens": 32, "num_resumed": 9}
            assert pair.go_on(moved, pair.begin(moved, **more), **more).finish.error == ""
        assert [one.tokens for one in list(pair.decode.results.values())[-4:]] == [own[9:] for own in expected[2:6]]
        assert imports(pair.decode) == [2 * len(PROMPTS) + len(FEW), 0]
        pair.assert_nothing_is_held()


def test_decode_drafts_from_its_own_tokens_on_behind_a_prefill_worker_without_the_head(base, expected, caplog):
    model, head = base
    with Pair(model, 16, 8, max_num_tokens=32, of_decode=drafting(head)) as pair:
        seen = watched(pair.decode)
        assert pair.run(PROMPTS, max_tokens=32) == expected
        drafted = sum(one.finish.usage.drafted_tokens for one in pair.decode.results.values())
        assert drafted > 100 and imports(pair.decode) == [0, len(PROMPTS)]
        assert pair.prefill.core._parts.speculation is None
        assert [record.levelname for record in caplog.records if "drafts_begin_late" in record.message] == ["WARNING"]
        known = {tuple(prompt): first_drafts([*prompt, *own]) for prompt, own in zip(PROMPTS, expected, strict=True)}
        assert any(known[prompt][length] != draft[0] for (prompt, length), draft in seen.items())
        pair.prefill.engine.stop()
        # What came without the head's rows is found, and not taken for what has them.
        assert pair.decode.run([request(prompt, 32) for prompt in PROMPTS]) == expected
        pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("backend", "of_prefill"),
    [("shm", "same"), ("shm", "wider"), ("files", "same"), ("shm", ""), pytest.param("nixl", "same", marks=needs_nixl)],
)
def test_a_head_s_rows_come_by_a_real_transfer_where_both_sides_have_it(
    base, expected, tmp_path, monkeypatch, backend, of_prefill
):
    model, head = base
    if backend == "files":
        monkeypatch.setattr(HostPool, "shared", lambda pool: None)
    wide = {
        name: tensor.repeat(2, 1) if "k_proj" in name or "v_proj" in name else tensor
        for name, tensor in make_tensors().items()
    }
    heads = {"same": head, "wider": write_head(tmp_path / "wide", wide, num_key_value_heads=4)}
    with real_pair(tmp_path, model, backend, heads.get(of_prefill), head) as pair:
        seen = watched(pair.decode)
        for prompts, answers in ((PROMPTS[:4], expected[:4]), (PROMPTS[3:], expected[3:])):
            assert pair.run(prompts, max_tokens=32) == answers
        assert imports(pair.decode) == ([9, 0] if of_prefill == "same" else [0, 9])
        if of_prefill == "same":
            assert_published(seen, PROMPTS, expected)


def real_pair(folder, model, backend, of_prefill, of_decode):
    transfers = [
        transfer_by("shm" if backend == "files" else backend, folder, worker) for worker in ("prefill", "decode")
    ]
    own = [drafting(head) if head else {} for head in (of_prefill, of_decode)]
    pair = Pair(model, 16, 8, transfers, *own, max_num_tokens=32)
    address = {"host": host_id(), "transfer_endpoint": transfers[0].endpoint}
    run_folder.publish(folder, WorkerRecord(worker="prefill", life=1, pid=os.getpid(), **address))
    return pair


def test_a_prefill_worker_with_another_head_hands_over_the_model_s_rows_alone(base, expected, tmp_path):
    model, head = base
    other = write_head(tmp_path / "wide", make_tensors(7))
    with Pair(model, max_num_tokens=32, of_prefill=drafting(other), of_decode=drafting(head)) as pair:
        whole(pair.decode)
        assert pair.run(FEW, max_tokens=32) == expected[2:6]
        assert imports(pair.decode) == [0, len(FEW)]
    with Pair(model, max_num_tokens=32, of_prefill=drafting(head)) as pair:
        assert pair.run(FEW, max_tokens=32) == expected[2:6]


def test_a_head_of_another_model_and_a_folder_that_is_not_there_are_refused(base, tmp_path):
    model, head = base
    other = tiny_models.save(tmp_path / "other", "llama", **BASE | {"hidden_size": 64})
    with pytest.raises(ConfigError, match="hidden_size is 32, the model's 64"):
        Harness(other, **drafting(head))
    with pytest.raises(ConfigError, match="/no/where does not exist"):
        Harness(model, **drafting("/no/where"))
