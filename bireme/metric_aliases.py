"""The names under which others look for what bireme counts: gateways, autoscalers and dashboards of other servers.

A recipe asks for sets of them in `metrics.aliases`. One table says which metric of `metrics.TABLE` an alias is made of;
nothing is counted twice. `Aliases` turns what changed in a registry into what changed under the other names, for
whoever publishes it. Names, labels and units are as the other side documents them; buckets of histograms are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from bireme.config import AliasSet, Recipe, stage_of
from bireme.metrics import TABLE, Kind, Labels, MetricDelta, MetricSpec

_ENDED_WELL = ("stop", "length", "not_finished")  # the last is a prefill's, whose request goes on elsewhere


@dataclass(frozen=True, slots=True)
class Form:
    """How a level is made of others."""

    text: str  # for the page of metrics
    of: Callable[..., float]


_SAME = Form("{}", lambda value: value)
_BOTH = Form("{} + {}", lambda first, second: first + second)
_REST = Form("{} - {}", lambda whole, part: whole - part)
_SHARE = Form("{} / {}", lambda part, whole: part / whole if whole else 0.0)
_ONE = Form("1, with {} and {} in labels", lambda *told: 1.0)


@dataclass(frozen=True, slots=True)
class Alias:
    """One other name. `sources` is one metric, or the gauges that `form` makes a level of."""

    name: str
    help: str
    sources: tuple[str, ...]
    form: Form = _SAME
    fixed: Mapping[str, str] = field(default_factory=dict)  # labels that are always the same
    only: tuple[str, ...] = ()  # the source's labels after `worker`; without it their series are added up
    renamed: str = ""  # the label that the source's one after `worker` becomes, by `values`
    values: Callable[[str], str] = str  # of the renamed label; "": this series is left out
    told: tuple[str, ...] = ()  # labels whose values are the sources' levels
    is_sum: bool = False  # a counter, of the sum of the source, a histogram

    @property
    def made_of(self) -> str:
        sources = [f"`{name}`" for name in self.sources]
        return f"the sum of {sources[0]}" if self.is_sum else self.form.text.format(*sources)

    @property
    def kind(self) -> Kind:
        return "counter" if self.is_sum else TABLE[self.sources[0]].kind

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels beside those of the set."""
        return (*self.fixed, *filter(None, (self.renamed,)), *self.told)


def _of_vllm(outcome: str) -> str:
    told = {"stop": "stop", "length": "length", "not_finished": "length", "cancelled": "abort"}
    return told.get(outcome, "error")


def _of_dynamo(outcome: str) -> str:
    return "success" if outcome in _ENDED_WELL else "error"


def _failed(outcome: str) -> str:
    return "" if outcome in (*_ENDED_WELL, "cancelled", "CANCELLED") else "generate"


_USED, _BLOCKS, _BLOCK_TOKENS = "bireme_kv_blocks_used", "bireme_kv_blocks_total", "bireme_kv_block_tokens"
_RUNNING, _WAITING, _ENDED = "bireme_requests_running", "bireme_requests_waiting", "bireme_requests_total"
_NV_REQUESTS = ("nv_trt_llm_request_metrics", "TRT LLM request metrics")
_NV_BLOCKS = ("nv_trt_llm_kv_cache_block_metrics", "TRT LLM KV cache block metrics")


def _nv_request(kind: str, source: str) -> Alias:
    return Alias(*_NV_REQUESTS, (source,), fixed={"request_type": kind})


def _nv_blocks(kind: str, form: Form, *sources: str) -> Alias:
    return Alias(*_NV_BLOCKS, sources, form, {"kv_cache_block_type": kind})


# Of Triton's TensorRT-LLM backend: its README, "Triton Metrics", and custom_metrics_reporter.
_TRITON_TRTLLM = (
    _nv_request("waiting", _WAITING),
    _nv_request("scheduled", _RUNNING),
    _nv_request("active", _RUNNING),
    _nv_request("max", "bireme_engine_max_batch_size"),
    _nv_blocks("used", _SAME, _USED),
    _nv_blocks("max", _SAME, _BLOCKS),
    _nv_blocks("free", _REST, _BLOCKS, _USED),
    _nv_blocks("fraction", _SHARE, _USED, _BLOCKS),
    _nv_blocks("tokens_per", _SAME, _BLOCK_TOKENS),
)
_VLLM = (
    Alias("vllm:num_requests_running", "Requests in the batch.", (_RUNNING,)),
    Alias("vllm:num_requests_waiting", "Requests queued in the engine.", (_WAITING,)),
    Alias("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", (_USED, _BLOCKS), _SHARE),
    Alias("vllm:gpu_cache_usage_perc", "KV blocks in use, 1 is all, older name.", (_USED, _BLOCKS), _SHARE),
    Alias(
        "vllm:cache_config_info",
        "The KV pool, in labels.",
        (_BLOCK_TOKENS, _BLOCKS),
        _ONE,
        told=("block_size", "num_gpu_blocks"),
    ),
    Alias("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", ("bireme_prompt_tokens_total",)),
    Alias("vllm:prefix_cache_hits_total", "Prompt tokens found.", ("bireme_cached_prompt_tokens_total",)),
    Alias("vllm:prompt_tokens_total", "Prompt tokens taken in.", ("bireme_prompt_tokens_total",)),
    Alias("vllm:generation_tokens_total", "Tokens generated.", ("bireme_generated_tokens_total",)),
    Alias("vllm:spec_decode_num_draft_tokens_total", "Tokens of drafts, verified.", ("bireme_draft_tokens_total",)),
    Alias(
        "vllm:spec_decode_num_accepted_tokens_total", "Of these, accepted.", ("bireme_accepted_draft_tokens_total",)
    ),
    Alias("vllm:num_preemptions_total", "Requests preempted.", ("bireme_preemptions_total",)),
    Alias(
        "vllm:request_success_total", "Requests ended.", (_ENDED,), renamed="finished_reason", values=_of_vllm
    ),
    Alias("vllm:time_to_first_token_seconds", "To the first token.", ("bireme_time_to_first_token_seconds",)),
    Alias("vllm:inter_token_latency_seconds", "Between tokens.", ("bireme_inter_token_latency_seconds",)),
    Alias("vllm:time_per_output_token_seconds", "Between tokens, older name.", ("bireme_inter_token_latency_seconds",)),
    Alias("vllm:e2e_request_latency_seconds", "From arrival to end.", ("bireme_request_seconds",)),
    Alias("vllm:request_queue_time_seconds", "In the queue.", ("bireme_queue_seconds",)),
    Alias("vllm:request_prompt_tokens", "Prompt tokens of a request.", ("bireme_prompt_tokens",)),
    Alias("vllm:request_generation_tokens", "Generated tokens of a request.", ("bireme_completion_tokens",)),
)  # fmt: skip
_DYNAMO_COMPONENT = (
    Alias("dynamo_component_requests_total", "Requests ended.", (_ENDED,)),
    Alias("dynamo_component_request_duration_seconds", "From arrival to end.", ("bireme_request_seconds",)),
    Alias("dynamo_component_inflight_requests", "Requests in the worker.", (_RUNNING, _WAITING), _BOTH),
    Alias(
        "dynamo_component_errors_total", "Requests that failed.", (_ENDED,), renamed="error_type", values=_failed
    ),
    Alias("dynamo_component_cancellation_total", "Requests cancelled.", ("bireme_cancellations_total",)),
    Alias("dynamo_component_total_blocks", "KV blocks of the pool.", (_BLOCKS,), fixed={"dp_rank": "0"}),
    Alias(
        "dynamo_component_gpu_cache_usage_percent",
        "KV blocks in use, 1 is all.",
        (_USED, _BLOCKS),
        _SHARE,
        {"dp_rank": "0"},
    ),
    Alias(
        "dynamo_component_kv_cache_hit_rate",
        "Share of prompt tokens found in the device's KV blocks.",
        ("bireme_kv_hit_rate",),
        fixed={"dp_rank": "0"},
        only=("device",),
    ),
    Alias("dynamo_component_model_load_time_seconds", "Start to ready.", ("bireme_engine_load_seconds",)),
)  # fmt: skip
_ACTIVE, _QUEUED = "bireme_model_requests_active", "bireme_model_requests_queued"
_MODEL = ("the model",)  # in its name's place
_DYNAMO_FRONTEND = (
    Alias("dynamo_frontend_requests_total", "Requests ended.", (_ENDED,), renamed="status", values=_of_dynamo),
    Alias("dynamo_frontend_request_duration_seconds", "From arrival to end.", ("bireme_request_seconds",)),
    Alias(
        "dynamo_frontend_time_to_first_token_seconds",
        "From arrival to the first token.",
        ("bireme_time_to_first_token_seconds",),
    ),
    Alias(
        "dynamo_frontend_inter_token_latency_seconds",
        "Between deliveries.",
        ("bireme_inter_token_latency_seconds",),
    ),
    Alias("dynamo_frontend_input_sequence_tokens", "Prompt tokens of a request.", ("bireme_answered_prompt_tokens",)),
    Alias("dynamo_frontend_cached_tokens", "Of these, cached ones.", ("bireme_answered_cached_tokens",)),
    Alias("dynamo_frontend_output_sequence_tokens", "Generated tokens.", ("bireme_answered_generated_tokens",)),
    Alias("dynamo_frontend_output_tokens_total", "Generated.", ("bireme_answered_generated_tokens",), is_sum=True),
    Alias("dynamo_frontend_active_requests", "Requests under way.", (_ACTIVE,), only=_MODEL),
    Alias("dynamo_frontend_inflight_requests", "Requests under way, older name.", (_ACTIVE,), only=_MODEL),
    Alias("dynamo_frontend_queued_requests", "Requests without a token.", (_QUEUED,), only=_MODEL),
    Alias(
        "dynamo_frontend_stage_requests",
        "Requests without a token.",
        (_QUEUED,),
        fixed={"stage": "dispatch", "phase": ""},
        only=_MODEL,
    ),
    Alias("dynamo_frontend_model_migration_total", "Streams moved.", ("bireme_migrations_total",)),
    Alias("dynamo_frontend_model_total_kv_blocks", "KV blocks of a worker.", (_BLOCKS,)),
    Alias("dynamo_frontend_model_kv_cache_block_size", "Tokens of a KV block.", (_BLOCK_TOKENS,)),
    Alias("dynamo_frontend_model_max_num_seqs", "Requests of a step.", ("bireme_engine_max_batch_size",)),
    Alias("dynamo_frontend_model_max_num_batched_tokens", "Tokens of a step.", ("bireme_engine_max_num_tokens",)),
    Alias("dynamo_frontend_model_context_length", "Tokens of a sequence.", ("bireme_engine_max_seq_len",)),
)
OF_WORKERS: dict[AliasSet, tuple[Alias, ...]] = {
    "triton_trtllm": _TRITON_TRTLLM,
    "vllm": _VLLM,
    "dynamo": _DYNAMO_COMPONENT,
}
OF_FRONTENDS: dict[AliasSet, tuple[Alias, ...]] = {"dynamo": _DYNAMO_FRONTEND}
_COMPONENTS = {"prefill": "prefill", "decode": "backend", "embedding": "backend"}  # Dynamo's names of stages


class Aliases:
    """Translates for one page. `specs`: of the names that it makes."""

    def __init__(self, own: Iterable[tuple[Alias, Mapping[str, str]]], worker: str) -> None:
        """`own`: with the labels of their set. `worker`: whose metrics they are made of."""
        self._worker = worker
        self.specs: dict[str, MetricSpec] = {}
        self._levels: list[tuple[Alias, Labels]] = []
        self._by_source: dict[str, list[tuple[Alias, Labels]]] = {}
        self._told: dict[str, Labels] = {}
        for alias, identity in own:
            source = TABLE[alias.sources[0]]
            buckets = source.buckets if alias.kind == "histogram" else ()
            self.specs[alias.name] = MetricSpec(alias.name, alias.kind, alias.help, (*identity, *alias.labels), buckets)
            first = (*identity.values(), *alias.fixed.values())
            if alias.kind == "gauge":
                self._levels.append((alias, first))
            else:
                self._by_source.setdefault(source.name, []).append((alias, first))

    def translate(self, delta: MetricDelta) -> MetricDelta:
        """Return the change under the other names alone; levels that lack a source are left out."""
        made = MetricDelta([], self._levels_of(delta), [])
        for name, labels, amount in delta.counters:
            made.counters.extend((alias.name, found, amount) for alias, found in self._named(name, labels))
        for name, labels, counts, total in delta.histograms:
            for alias, found in self._named(name, labels):
                if alias.is_sum:
                    made.counters.append((alias.name, found, total))
                else:
                    made.histograms.append((alias.name, found, counts, total))
        return made

    def _levels_of(self, delta: MetricDelta) -> list[tuple[str, Labels, float]]:
        levels = {(name, labels[1:]): value for name, labels, value in delta.gauges if labels[0] == self._worker}
        made = []
        for alias, first in self._levels:
            known = [levels[source, alias.only] for source in alias.sources if (source, alias.only) in levels]
            if len(known) == len(alias.sources):
                labels = (*first, *(f"{value:.0f}" for value in known)) if alias.told else first
                made += [(alias.name, labels, alias.form.of(*known)), *self._former(alias, labels)]
        return made

    def _former(self, alias: Alias, labels: Labels) -> list[tuple[str, Labels, float]]:
        """Return what takes back the series of other levels: Triton takes none off its page."""
        if not alias.told:
            return []
        before, self._told[alias.name] = self._told.get(alias.name, labels), labels
        return [(alias.name, before, 0.0)] if before != labels else []

    def _named(self, source: str, labels: Labels) -> Iterable[tuple[Alias, Labels]]:
        if labels[0] != self._worker:
            return
        for alias, first in self._by_source.get(source, ()):
            if not alias.renamed:
                yield alias, first
            elif value := alias.values(labels[1]):
                yield alias, (*first, value)


def aliases_of_worker(recipe: Recipe, worker: str) -> Aliases | None:
    """Return what the stub of a Triton model publishes beside; None: nothing."""
    component = _COMPONENTS.get(stage_of(worker))
    if component is None:
        return None
    return _aliases(recipe, worker, worker, component)


def aliases_of_launch(recipe: Recipe) -> Aliases | None:
    """Return what is told of all workers together, whose metrics are those of the worker ""; None: nothing."""
    return _aliases(recipe, "", "all", "backend")


def _aliases(recipe: Recipe, worker: str, shown: str, component: str) -> Aliases | None:
    identities: dict[AliasSet, dict[str, str]] = {
        "triton_trtllm": {"model": shown, "version": "1"},
        "vllm": {"model_name": recipe.served_name, "engine": shown},
        "dynamo": {
            "model": recipe.served_name,
            "worker_id": shown,
            "dynamo_namespace": recipe.name,
            "dynamo_component": component,
            "dynamo_endpoint": "generate",
        },
    }
    own = [(alias, identities[name]) for name in set(recipe.metrics.aliases) for alias in OF_WORKERS[name]]
    return Aliases(own, worker) if own else None


def aliases_of_frontend(recipe: Recipe, worker: str) -> Aliases | None:
    """Return what a frontend publishes beside of one model; None: nothing."""
    model = recipe.served_name
    own = [alias for name in set(recipe.metrics.aliases) for alias in OF_FRONTENDS.get(name, ())]
    ours = [(replace(one, only=(model,)) if one.only == _MODEL else one, {"model": model}) for one in own]
    return Aliases(ours, worker) if own else None
