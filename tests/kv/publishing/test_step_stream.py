"""Step records on their way out, over real sockets: in order and numbered, and no reader is waited for."""

from __future__ import annotations

import time

import pytest

from bireme.kv.publishing.step_stream import StepStream
from bireme.kv.wire.event_wire import decode_load
from bireme.kv.wire.step_records import QueuedRequests, ScheduledRequests, StepRecord, StepRing
from bireme.metrics import Registry
from tests.kv.publishing.event_readers import StepSubscriber
from tests.kv.publishing.published import Published

SCHEDULED = {
    "num_prefill_requests": 2,
    "sum_prefill_tokens": 60,
    "var_prefill_length": 2.25,
    "sum_prefill_kv_tokens": 32,
    "num_decode_requests": 3,
    "sum_decode_kv_tokens": 300,
    "var_decode_kv_tokens": 0.5,
}
QUEUED = {
    "num_prefill_requests": 1,
    "sum_prefill_tokens": 70,
    "var_prefill_length": 0.0,
    "num_decode_requests": 0,
    "sum_decode_kv_tokens": 0,
    "var_decode_kv_tokens": 0.0,
}


def step(rank=0, scheduled=SCHEDULED, **fields):
    counts = (ScheduledRequests(**scheduled), QueuedRequests(**QUEUED))
    return StepRecord(
        dp_rank=rank, wall_time=0.005, scheduled_requests=counts[0], queued_requests=counts[1], ts=1.5, **fields
    )


@pytest.fixture
def published(tmp_path):
    made = []

    def make(**settings):
        one = Published(tmp_path, **({"ring": StepRing(), "has_events": False} | settings))
        reader = StepSubscriber(one.record.step_endpoint)
        made.extend([reader, one])
        first = reader.take()  # a sign of life: it is connected
        assert first["wall_time"] == 0 and set(first["scheduled_requests"].values()) == {0}
        return one, reader, first["counter_id"]

    yield make
    for one in made:
        one.close()


def test_a_record_has_the_fields_of_dynamo_s_form_and_bireme_s_own(published):
    one, reader, last = published()
    one.ring.add(step(path="packed"))
    one.publisher.wake()
    assert reader.take() == {
        "version": 1,
        "worker_id": "decode@here:1",
        "dp_rank": 0,
        "counter_id": last + 1,
        "wall_time": 0.005,
        "scheduled_requests": SCHEDULED,
        "queued_requests": QUEUED,
        "ts": 1.5,
        "life": 7,
        "path": "packed",
    }


def test_what_is_not_known_is_absent(published):
    one, reader, _ = published()
    one.ring.add(step(scheduled={"num_decode_requests": 3}))
    one.publisher.wake()
    record = reader.take()
    assert record["scheduled_requests"] == {"num_decode_requests": 3} and "path" not in record


def test_a_reader_gets_every_record_of_a_burst_in_order(published):
    one, reader, last = published()
    for at in range(3000):
        one.ring.add(step(scheduled={"num_decode_requests": at}))
        if at % 100 == 0:
            one.publisher.wake()
    one.publisher.wake()
    records = reader.until(lambda record: record["scheduled_requests"].get("num_decode_requests") == 2999)
    told = [record["counter_id"] for record in records]
    assert told == list(range(last + 1, last + 1 + len(told)))
    steps = [one["scheduled_requests"]["num_decode_requests"] for one in records if one["wall_time"]]
    assert steps == list(range(3000))


def test_records_for_which_there_was_no_room_are_a_gap_in_the_numbers_and_counted():
    ring, metrics = StepRing(4), Registry("decode")
    stream = StepStream(ring, "decode", 1, 1, metrics)
    beat = [number for number, _ in stream.take()]
    for _ in range(10):
        ring.add(step())
    assert beat + [number for number, _ in stream.take()] == [0, 7, 8, 9, 10]
    assert ("bireme_step_records_lost_total", ("decode",), 6.0) in metrics.take_delta().counters
    ring.add(step())
    assert [number for number, _ in stream.take()] == [11]


def test_ranks_are_numbered_for_themselves(published):
    one, reader, _ = published(num_ranks=2)
    assert reader.take()["dp_rank"] == 1
    for rank in (1, 0, 1):
        one.ring.add(step(rank))
    one.publisher.wake()
    found = [reader.take() for _ in range(3)]
    assert [record["dp_rank"] for record in found] == [1, 0, 1]
    assert found[2]["counter_id"] == found[0]["counter_id"] + 1


def test_a_reader_that_stops_reading_costs_the_engine_nothing(published):
    one, stuck, _ = published()
    other = StepSubscriber(one.record.step_endpoint)
    other.take()  # a sign of life
    for at in range(16_000):  # more than all buffers on the way hold
        one.ring.add(step(scheduled={"num_decode_requests": at}))
        if at % 1000 == 999:
            one.publisher.wake()
            other.until(lambda record, at=at: record["scheduled_requests"].get("num_decode_requests") == at)
    counters = {name for name, _, count in one.metrics.take_delta().counters if count}
    assert not counters & {"bireme_step_records_lost_total", "bireme_kv_event_errors_total"}
    one.close()
    seen = [stuck.take()["counter_id"]]
    while stuck.sub.poll(200):
        seen.append(stuck.take()["counter_id"])
    assert seen == sorted(seen) and len(seen) < 15_000
    other.close()


def test_steps_are_in_the_metrics_by_what_they_computed():
    ring, metrics = StepRing(), Registry("decode")
    stream = StepStream(ring, "decode", 1, 1, metrics)
    decode = SCHEDULED | {"num_prefill_requests": 0, "sum_prefill_tokens": 0}
    kinds = [SCHEDULED, decode, decode, SCHEDULED | {"num_decode_requests": 0}, {"num_decode_requests": 3}]
    for scheduled in kinds:
        ring.add(step(scheduled=scheduled))
    assert len(list(stream.take())) == len(kinds)
    found = {(name, labels[1]): (sum(counts), total) for name, labels, counts, total in metrics.take_delta().histograms}
    assert found["bireme_forward_pass_tokens", "mixed"] == (1, 63)
    assert found["bireme_forward_pass_tokens", "decode"] == (2, 6)
    assert found["bireme_forward_pass_tokens", "prefill"] == (1, 60)
    assert found["bireme_forward_pass_seconds", "decode"] == (2, pytest.approx(0.01))


def test_load_is_told_beside_records_on_a_socket_of_its_own(published):
    one, _, _ = published()
    reader = StepSubscriber(one.record.load_endpoint)
    assert reader.sub.poll(5000)
    topic, _, payload = reader.sub.recv_multipart()
    assert topic == b"load" and abs(decode_load(payload).ts - time.time()) < 60
    reader.close()


def test_without_records_there_is_no_socket_for_them(tmp_path):
    one = Published(tmp_path)
    assert one.record.step_endpoint == "" and not list(tmp_path.glob("*.s"))
    one.close()
