"""Dynamo's rule by worked cases of its published formulas."""

import pytest

from bireme.config import MockerConfig
from bireme.planner.capacity import PlannedEngine
from bireme.planner.dynamo_rule import DynamoProfile, DynamoRule, num_decode, num_prefill
from bireme.planner.observation import Observation, StageObservation
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.sizing.step_times import StepTimes

# A prompt of 3,000 tokens takes 310 ms: 9,677 tokens/s. A step of 40 rows takes 50 ms: 800 tokens/s.
ENGINE = PlannedEngine(
    StepTimes.of_mocker(MockerConfig(step_ms=10, step_ms_per_request=1, prefill_ms=0, prefill_ms_per_token=0.1))
)
PROFILE = DynamoProfile(ENGINE, ENGINE)


def decided(requests, ttft=310.0, itl=None, max_gpus=64, decode_gpus=1, ready=1):
    settings = PlannerSettings(itl_ms=50, max_gpus=max_gpus, decode=StageBounds(gpus=decode_gpus))
    observation = Observation(
        180.0, 180.0, requests, 3000.0, 150.0, ttft, itl, StageObservation(1), StageObservation(ready)
    )
    decision = DynamoRule(settings, PROFILE).decide(observation)
    return decision.prefill, decision.decode


@pytest.mark.parametrize(
    ("requests_per_s", "prompt", "correction", "tokens_per_s", "workers"),
    [(10, 3000, 1.0, 10_000, 3), (10, 3000, 0.5, 10_000, 2), (10, 3000, 4.0, 10_000, 3), (10.01, 3000, 1.0, 10_000, 4)],
)
def test_prefill_counts_a_correction_below_one_alone(requests_per_s, prompt, correction, tokens_per_s, workers):
    assert num_prefill(requests_per_s, prompt, correction, tokens_per_s) == workers


def test_decode_is_answers_over_the_best_throughput():
    assert num_decode(10, 150, 800) == 2
    assert num_decode(10, 160, 800) == 2
    assert num_decode(10.1, 160, 800) == 3


def test_the_profile_s_best_throughput_keeps_the_gap():
    assert PROFILE.decode_tokens_per_s(50, 3075) == pytest.approx(800)
    assert PROFILE.decode_tokens_per_s(30, 3075) == pytest.approx(20 / 0.030)
    assert PROFILE.decode_tokens_per_s(5, 3075) == pytest.approx(1 / 0.011)  # none does


def test_a_worked_case():
    """10 requests/s of 3,000 and 150 tokens: 30,000 / 9,677 and 1,500 / 800."""
    assert decided(1800) == (4, 2)


def test_a_worked_case_with_corrections():
    """TTFT half of what was expected: 15,000 / 9,677. ITL twice: 25 ms are asked for, 15 rows make 600 tokens/s."""
    # 10/s x 150 tokens x 40 ms: 60 under way; on 6 workers 10 each, for which the table says 20 ms.
    assert decided(1800, ttft=155.0, itl=40.0, ready=6) == (2, 3)


def test_a_budget_scales_both():
    """Twice as much needs 7 + 4 = 11; of 6 GPUs prefill gets round(7 x 6 / 11) = 4, decode the rest."""
    assert decided(3600) == (7, 4)
    assert decided(3600, max_gpus=6) == (4, 2)


def test_without_requests_it_stays_as_it_was():
    assert decided(0, ready=5) == (1, 5)
