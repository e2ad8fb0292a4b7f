"""Steps that are started before the tokens of the one before are known, and requests whose KV comes from prefill."""

from __future__ import annotations

from bireme.engines.torch.step import SchedulerOutput, SequenceStatus
from tests.engines.torch.scheduler_steps import Overlapping


def running(**limits):
    """Return steps, started ahead, of one request."""
    steps = Overlapping(**limits)
    live = steps.add()
    for _ in range(4):
        steps.step()
    assert steps.started is not None
    return steps, live


def join(steps, sequence):
    sequence.state, sequence.is_sampling, sequence.computed = SequenceStatus.RUNNING, True, len(sequence.tokens)
    sequence.tokens.append(7)
    sequence.first_token_at = steps.now


def test_a_request_whose_kv_comes_is_admitted_beside_a_step():
    steps, live = running()
    coming = steps.add_import(num_prompt=40)
    for admitted in ([coming], [], []):
        assert steps.step() == [live] and steps.admitted == admitted
        assert steps.started is not None and coming.state is SequenceStatus.IMPORTING
    assert len(coming.table.blocks[0]) == 10
    join(steps, coming)
    steps.step()
    assert steps.step() == [live, coming] and steps.started is not None


def test_all_that_wait_are_admitted_and_a_prompt_joins_the_next_step():
    steps, live = running()
    first, second = steps.add_import(), steps.add_import()
    prompt, third = steps.add(), steps.add_import()
    assert steps.step() == [live] and steps.admitted == [first, second]
    assert steps.step() == [live] and steps.admitted == [third]
    assert steps.started.chunks == [(prompt, 4)] and third.state is SequenceStatus.IMPORTING
    assert steps.step() == [live, prompt]
    assert steps.started is not None and steps.step() == [live, prompt]


def test_a_prompt_that_joins_has_its_own_tokens_however_few_are_left_to_compute():
    steps, live = running()
    prompt = steps.add(num_prompt=1)
    steps.step()
    assert steps.started.decodes == [live] and steps.started.chunks == [(prompt, 1)]


def test_a_prompt_that_does_not_fit_into_a_step_goes_on_in_one_that_is_planned_anew():
    steps, live = running()
    prompt = steps.add(num_prompt=100)
    steps.step()
    assert steps.started.chunks == [(prompt, 63)]
    steps.step()
    assert steps.started is None and steps.step() == [live, prompt] and steps.started is not None


def test_where_its_parts_can_be_started_ahead_it_goes_on_at_once():
    steps, live = running(can_start=True)
    first, second = steps.add(num_prompt=150), steps.add(num_prompt=10)
    steps.step()
    assert steps.started.chunks == [(first, 63)]
    steps.step()
    assert steps.started.chunks == [(first, 63)] and (first.computed, steps.scheduler.num_prefill_tokens) == (63, 24)
    assert steps.step() == [live, first] and steps.started.chunks == [(first, 24), (second, 10)]
    assert first.computed == 126 and len(first.table.blocks[0]) == 38
    assert steps.step() == [live, first, second]
    assert first.num_output == 1 and steps.started.decodes == [live, first, second]


def test_a_part_for_which_there_is_no_room_waits_for_the_step_before_it():
    steps, live = running(can_start=True, may_preempt=True, num_blocks=40)
    prompt = steps.add(num_prompt=120)
    for _ in range(9):
        steps.step()
    assert prompt.first_token_at and live.first_token_at


def test_one_whose_first_block_is_being_computed_waits_for_it():
    steps, live = running(enable_reuse=True)
    prompt, same = steps.add(num_prompt=20), steps.add(num_prompt=20)
    steps.step()
    assert steps.started.chunks == [(prompt, 16)]  # the one that runs has computed the first block
    steps.step()
    assert steps.started.chunks == [] and same.state is SequenceStatus.WAITING
    steps.step()
    assert same.computed == 16 and steps.started.chunks == [(same, 4)]


def test_one_that_finds_no_room_holds_up_nobody_and_comes_in_when_there_is_some():
    steps, live = running(num_blocks=600)  # the one that runs may need 501
    first, second = steps.add_import(max_tokens=200), steps.add_import(max_tokens=300)
    for _ in range(5):
        assert steps.step() == [live] and steps.started is not None
    assert first.state is SequenceStatus.IMPORTING and second.state is SequenceStatus.WAITING
    steps.drop(first)
    steps.step()
    assert steps.admitted == [second] and steps.started is not None


def test_one_that_takes_the_place_of_a_best_effort_request_waits_for_the_step():
    steps = Overlapping(max_batch_size=2)
    lines = [steps.line(), steps.line()]
    for _ in range(5):
        steps.step()
    coming = steps.add_import()
    for _ in range(3):
        steps.step()
    assert coming.state is SequenceStatus.IMPORTING and lines[1].state is SequenceStatus.WAITING


def test_of_an_aborted_prompt_nothing_is_left_to_compute():
    steps = Overlapping(can_start=True)
    stream = steps.add(8)
    while not stream.first_token_at:
        steps.step()
    steps.step()
    long = steps.add(1000)
    while not long.computed:
        steps.step()
    assert steps.scheduler.num_prefill_tokens > 0
    steps.started = None  # it has ended as well
    steps.drop(long)
    plan = SchedulerOutput(decodes=[stream])
    assert steps.scheduler.follow(plan) is not None
    assert steps.scheduler.num_prefill_tokens == 0
