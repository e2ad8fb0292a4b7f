from dataclasses import dataclass

from bireme.metrics import Registry
from bireme.multimodal.embedding_cache import EmbeddingCache


@dataclass
class Value:
    num_bytes: int


def made(capacity, *entries):
    metrics = Registry("encoder")
    cache = EmbeddingCache(capacity, metrics)
    for key, size in entries:
        cache.put(key, Value(size))
    return cache, metrics


def evictions(metrics):
    return sum(value for name, _, value in metrics.take_delta().counters if name.endswith("evictions_total"))


def test_the_least_recently_used_goes_first():
    cache, metrics = made(100, ("a", 40), ("b", 40))
    cache.get("a")
    cache.put("c", Value(40))
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]
    assert (cache.used_bytes, evictions(metrics)) == (80, 1)


def test_a_value_in_place_of_another_is_counted_once():
    cache, metrics = made(100, ("a", 40), ("a", 70))
    assert (cache.used_bytes, len(cache), evictions(metrics)) == (70, 1, 0)


def test_what_is_larger_than_everything_is_not_kept_and_drives_nobody_out():
    cache, metrics = made(100, ("a", 60), ("b", 101))
    assert (cache.get("b"), cache.used_bytes, evictions(metrics)) == (None, 60, 0)


def test_several_go_where_one_is_not_enough():
    cache, metrics = made(100, ("a", 30), ("b", 30), ("c", 30), ("d", 90))
    assert (len(cache), cache.used_bytes, evictions(metrics)) == (1, 90, 3)


def test_without_capacity_nothing_is_kept():
    cache, _ = made(0, ("a", 1))
    assert (cache.get("a"), len(cache)) == (None, 0)


def test_gauges_say_what_is_kept():
    _, metrics = made(100, ("a", 30), ("b", 30))
    gauges = {name: value for name, _, value in metrics.take_delta().gauges}
    assert gauges == {"bireme_embedding_cache_bytes": 60, "bireme_embedding_cache_entries": 2}
