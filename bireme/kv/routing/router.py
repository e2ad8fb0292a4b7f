"""Which workers serve a request.

A `WorkerRouter` decides placements and is told how they went and which workers there are; pipelines keep no accounts of
their own. In mode kv the worker with the lowest cost wins (with a temperature, it is the likeliest):

    prefill_weight x (this prompt - what the worker holds of it) / tokens_per_block
    + waiting_weight x prompt tokens that wait there / tokens_per_block
    + decode_weight x blocks in use there, with this prompt's

What a worker does not hold also takes the place of older blocks. So it is dearer where the pool turns over faster than
the others', by turnover_weight where that is twice the mean, and cheaper where it turns over more slowly. Otherwise a
prefix that all prompts share would keep them on one worker, whose pool overflows while others' are empty.

A prefill worker has the first two lines alone. A decode worker that gets its KV from prefill pays for what it does not
hold at the price of a transfer, and nothing for what waits.

Load is the worker's own report, and what this router has sent since. What a worker holds is known from its KV events,
and for a while from placements whose events are still to come.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from bireme.config import RouterConfig, RoutingMode, split_worker
from bireme.discovery import live_settings
from bireme.discovery.records import WorkerRecord, can_transfer
from bireme.errors import RequestError, ResourceExhaustedError, UnavailableError
from bireme.kv.kernels.arrays import Floats, Hashes, Mask
from bireme.kv.routing.active import NO_BLOCKS, SentRequest
from bireme.kv.routing.block_uses import BlockUses
from bireme.kv.routing.generations import choose
from bireme.kv.routing.placement import (
    ANYBODY,
    Candidate,
    Flow,
    HashPrompt,
    Holdings,
    Placement,
    RoutingRequest,
    WorkerFollower,
    WorkerWork,
)
from bireme.kv.routing.prompt_prices import PromptSide, Transfer, believed, is_decode_cheaper
from bireme.kv.routing.sessions import SessionTable
from bireme.kv.routing.targets import DEFAULT_TOKENS_PER_BLOCK, StageTargets, Target
from bireme.kv.wire.event_wire import WorkerLoad

DOWN_S, MAX_DOWN_S = 1.0, 8.0  # how long a lost worker is skipped, unless it is the only one; doubles with each loss
MAX_RETRY_S = 60  # that a refused request is told to wait
_STEP_TOKENS = 2048  # of a worker that does not tell: the most of a step
_EVEN = 1e-9  # costs that differ by less are even


@dataclass(frozen=True, slots=True)
class Prices:
    """What a KV block costs at a stage, in the unit of all costs."""

    new: float  # that the worker does not hold
    waiting: float  # of prompts that wait there
    used: float  # by running requests


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage's part of a placement."""

    target: Target
    reason: str
    hashes: Hashes | None  # of the prompt's full blocks; None: nobody keeps an account of them
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Decision:
    prefill: StageChoice | None  # None: decode computes the prompt
    decode: StageChoice
    is_short: bool = False  # too short for a transfer

    def placement(self, sent: tuple[tuple[Target, SentRequest], ...] = ()) -> Placement:
        prefill, decode = self.prefill, self.decode
        cached_tokens = (prefill or decode).cached_tokens
        worker, rank = (prefill.target.worker, prefill.target.dp_rank) if prefill is not None else (None, None)
        return Placement(
            worker, decode.target.worker, rank, decode.target.dp_rank, decode.reason, self.is_short,
            decode.target.generation, cached_tokens, sent,
        )  # fmt: skip


class WorkerRouter:
    """Used on one loop's thread; must be quick."""

    flows: dict[tuple[str, str], Flow] | None = None  # by prefill ("": none) and decode worker; None: not counted

    def __init__(
        self,
        config: RouterConfig,
        mode: RoutingMode,
        *,
        enforce_disaggregation: bool = False,
        holdings: Holdings | None = None,
        hash_prompt: HashPrompt | None = None,
        loads: Mapping[str, WorkerLoad] | None = None,
        followers: Sequence[WorkerFollower] = (),
        clock: Callable[[], float] = time.monotonic,
        draw: random.Random | None = None,
    ) -> None:
        """`holdings` and `hash_prompt`: mode kv needs both. `loads`: by worker, kept up to date by its owner.

        Without loads, load plays no part and none is counted. `followers` are told of workers, and closed at the end.
        """
        self.mode, self._config, self._must_transfer = mode, config, enforce_disaggregation
        self._holdings, self._hash_prompt, self._followers = holdings, hash_prompt, tuple(followers)
        self._counts_load = loads is not None
        self._loads: Mapping[str, WorkerLoad] = loads if loads is not None else {}
        self._clock, self._draw = clock, draw or random.Random()
        uses = BlockUses() if self._counts_load and hash_prompt is not None else None
        self._stages = {
            name: StageTargets({} if loads is None else loads, uses, config.turnover_weight)
            for name in ("prefill", "decode")
        }
        self._turns = dict.fromkeys(self._stages, -1)
        self._records: Mapping[str, WorkerRecord] = {}
        self._down_until: dict[str, float] = {}
        self._skip_s: dict[str, float] = {}  # how long the next loss lasts, of workers that were lost lately
        self._silent: set[str] = set()  # servers
        self._sessions = SessionTable(config.session_ttl_s, config.max_sessions)

    def set_workers(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view: worker id (`decode_1`, or `decode_1@host:8001` on another server) -> record.

        Those that drain get nothing new. A worker that is missing has left or was lost; what runs there is its
        caller's.
        """
        for worker in [name for name in self._skip_s if _life(workers, name) != _life(self._records, name)]:
            self._forget_losses(worker)  # its engine is another one
        self._records = workers
        for name, stage in self._stages.items():
            stage.set_workers({worker: record for worker, record in workers.items() if record.stage == name})
        for follower in self._followers:
            follower.follow(workers)

    @property
    def problem(self) -> str:
        """Why placements rest on an old view of what workers hold and do; "": they don't."""
        return "; ".join(problem for follower in self._followers if (problem := follower.problem))

    def place(
        self, request: RoutingRequest, *, avoid: Collection[str] = (), seen: list[Candidate] | None = None
    ) -> Placement:
        """Choose workers, none of `avoid` if there is another. `seen` is given all workers with their costs.

        `finished` must follow every placement. Raises UnavailableError without a decode worker, ResourceExhaustedError
        when all are busy, RequestError for a choice that can't be met.
        """
        now = self._clock()
        decision = self._decide(request, avoid, now)
        if self.flows is not None:
            _count_flow(self.flows, decision, request)
        if seen is not None:
            seen += self._candidates(request, decision, now)
        if not self._counts_load:
            return decision.placement()
        prefill, decode = decision.prefill, decision.decode
        sent = [(decode.target, _sent(decode, request, is_used=True, is_computed=prefill is None))]
        if prefill is not None:
            sent.append((prefill.target, _sent(prefill, request, is_used=False, is_computed=True)))
        for target, part in sent:
            self._stages[target.record.stage].add(target, part, now)
        for choice in (prefill, decode):
            if choice is not None and choice.hashes is not None and self._holdings is not None:
                self._holdings.predict(choice.target.key, choice.hashes)
        return decision.placement(tuple(sent))

    def preview(self, request: RoutingRequest) -> tuple[Placement, list[Candidate]]:
        """Return what `place` would decide now, and all workers with their costs; nothing is counted.

        A mode that takes turns has had its turn.
        """
        now = self._clock()
        decision = self._decide(request, (), now)
        return decision.placement(), self._candidates(request, decision, now)

    def _candidates(self, request: RoutingRequest, decision: Decision, now: float) -> list[Candidate]:
        candidates: list[Candidate] = []
        for name, stage in self._stages.items():
            has_prefill = decision.prefill is not None or not stage.targets
            hashes = self._hash_prompt and self._hash_prompt(request, stage.tokens_per_block)
            held, cached = self._held(stage, request, hashes)
            costs = self._costs(stage, self._prices(name, has_prefill), request, hashes, held, now)
            waiting = stage.waiting_tokens(now)
            candidates += [
                Candidate(
                    target.worker, target.dp_rank, round(float(costs[at]), 6),
                    _cached_tokens(stage, request, cached[at]), float(waiting[at]), float(stage.blocks[at]),
                    float(stage.requests[at]),
                )
                for at, target in enumerate(stage.targets)
            ]  # fmt: skip
        return candidates

    @property
    def follows_load(self) -> bool:
        """Whether workers' reports come in, and what is sent to them is counted."""
        return self._counts_load

    def work_of(self, worker: str) -> WorkerWork:
        """Return what is known of a worker of any stage; nothing is counted."""
        actives = [one.active for stage in self._stages.values() for one in stage.targets if one.worker == worker]
        is_silent = split_worker(worker)[1] in self._silent
        skip_s = math.inf if is_silent else max(0.0, self._down_until.get(worker, 0.0) - self._clock())
        return WorkerWork(
            self._loads.get(worker),
            sum(active.num_requests for active in actives),
            sum(active.prefill_tokens for active in actives),
            skip_s,
        )

    def prefilled(self, placement: Placement) -> None:
        """The prompt has been computed, its first token is there."""
        now = self._clock()
        for target, sent in placement.sent:
            stage = self._stages[target.record.stage]
            stage.prefilled(target, sent, now)
            if target.worker == placement.prefill:
                stage.free(target, sent)

    def finished(self, placement: Placement) -> None:
        """Nothing of this placement is running any more."""
        for target, sent in placement.sent:
            self._stages[target.record.stage].free(target, sent)

    def note_down(self, worker: str) -> None:
        """The worker was lost, or could not be reached. Requests that were lost together count once."""
        now = self._clock()
        if self._down_until.get(worker, 0.0) > now:
            return
        skip_s = self._skip_s.get(worker, DOWN_S)
        self._down_until[worker], self._skip_s[worker] = now + skip_s, min(2 * skip_s, MAX_DOWN_S)

    def note_up(self, worker: str) -> None:
        """The worker has answered."""
        if worker not in self._skip_s:
            return
        self._down_until.pop(worker, None)
        self._skip_s[worker] /= 2
        if self._skip_s[worker] < DOWN_S:
            del self._skip_s[worker]

    def note_silence(self, server: str, is_silent: bool) -> None:
        """The host of another server does not answer, or does again: its workers come back as those that were lost."""
        if is_silent:
            self._silent.add(server)
        elif server in self._silent:
            self._silent.discard(server)
            for worker in self._workers_of([server]):
                self.note_down(worker)

    def close(self) -> None:
        for follower in self._followers:
            follower.close()

    def _decide(self, request: RoutingRequest, avoid: Collection[str], now: float) -> Decision:
        """Choose decode first: what it holds says whether prefill is worth its transfer."""
        if self._counts_load:
            for stage in self._stages.values():
                stage.sync()
        skipped = {*avoid, *self._down(now)}
        sources = self._sources(request, skipped)
        has_prefill = bool(sources.any())
        takers = self._takers(request, (skipped, avoid, ()), has_prefill)
        if self._must_transfer:
            takers = self._fed(takers, sources)
        decode = self._choose(
            "decode", takers, request, self._prices("decode", has_prefill), now, generation=request.generation
        )
        if not has_prefill:
            return Decision(None, decode)
        wanted = request.wanted("prefill")
        if not wanted[0] and self._is_short(request, decode, sources, now):
            return Decision(None, decode, is_short=True)
        reach = self._reach("prefill", decode.target.record)
        if wanted == ANYBODY and not (sources & reach).any():
            return Decision(None, decode)
        return Decision(
            self._choose(
                "prefill", sources & reach, request, self._prices("prefill", True), now, reach,
                decode.target.record.generation,
            ),
            decode,
        )  # fmt: skip

    def _sources(self, request: RoutingRequest, skipped: Collection[str]) -> Mask:
        """Return the prefill workers that may compute the prompt; none of them: decode does."""
        prefills = self._stages["prefill"]
        if request.is_resumed or not (request.has_transfer or self._must_transfer):
            return np.zeros_like(prefills.is_ready)
        sources = prefills.allowed(skipped)
        if self._must_transfer and not sources.any():
            sources = prefills.is_ready  # all are down; the caller's pauses wait for their return
            if not sources.any():
                raise UnavailableError(
                    "no prefill worker takes requests now (pipeline.enforce_disaggregation); try again"
                )
        return sources

    def _takers(self, request: RoutingRequest, skipped: Sequence[Collection[str]], has_prefill: bool) -> Mask:
        """Return the decode workers without the first of `skipped` that leaves any.

        If the KV of the prefill worker that the request names gets to some of them, these.
        """
        masks = map(self._stages["decode"].allowed, skipped)
        if request.revision:
            masks = map(self._stages["decode"].is_like(request.revision).__and__, masks)
        takers = next((some for some in masks if some.any()), None)
        if takers is None:
            of_revision = f" of the model's revision {request.revision}" if request.revision else ""
            raise UnavailableError(f"no decode worker{of_revision} takes requests now; try again")
        prefill, _ = request.wanted("prefill")
        if not has_prefill or prefill not in self._records:
            return takers
        reached = takers & self._reach("decode", self._records[prefill])
        return reached if reached.any() else takers

    def _fed(self, takers: Mask, sources: Mask) -> Mask:
        """Of several generations' takers return those that get KV from one of the sources; all where none does."""
        stage = self._stages["decode"]
        if stage.generations is None or not sources.any():
            return takers
        fed = np.zeros_like(takers)
        for at in np.flatnonzero(takers):
            fed[at] = (sources & self._reach("prefill", stage.targets[at].record)).any()
        return fed if fed.any() else takers

    def _choose(
        self,
        name: str,
        allowed: Mask,
        request: RoutingRequest,
        prices: Prices,
        now: float,
        reach: Mask | None = None,
        generation: int | None = None,
    ) -> StageChoice:
        """Choose one of a stage's workers: by the request itself, by generations, by its session, by the mode.

        `reach`: those that can do this request's part; None: all can. `generation`: the preferred; None: by weight.
        """
        stage, reason = self._stages[name], ""
        mode = self._mode(request)
        if (wanted := request.wanted(name)) != ANYBODY:
            allowed, reason = self._named(name, *wanted, reach), "direct"
        allowed = self._of_generation(stage, self._not_busy(name, allowed, request, now), request, generation)
        hashes = self._hash_prompt and self._hash_prompt(request, stage.tokens_per_block)
        held, cached = self._held(stage, request, hashes)
        if (session := request.options.session_id) and len(stage.targets) > 1:
            worker = self._sessions.worker(session, name, compress(stage.workers, allowed), now)
            allowed = allowed & stage.is_of(worker)
            reason = reason or "session"
        if np.count_nonzero(allowed) == 1:
            index = int(allowed.argmax())
        else:
            reason = reason or mode
            index = self._by_mode(mode, name, allowed, request, prices, hashes, held, now)
        known = _cached_tokens(stage, request, cached[index]) if self._holdings is not None else None
        return StageChoice(stage.targets[index], reason or "only", hashes, known)

    def _by_mode(
        self,
        mode: RoutingMode,
        name: str,
        allowed: Mask,
        request: RoutingRequest,
        prices: Prices,
        hashes: Hashes | None,
        held: Floats,
        now: float,
    ) -> int:
        stage, draw = self._stages[name], self._draw
        if mode == "kv":
            costs = self._costs(stage, prices, request, hashes, held, now)
            return draw_cost(costs, allowed, stage.requests, self._config.temperature, draw)
        if mode == "least_loaded":
            return draw_cost(stage.requests, allowed, stage.blocks, 0.0, draw)
        if mode == "power_of_two":
            pair = np.zeros(len(allowed), bool)
            pair[draw.sample(np.flatnonzero(allowed).tolist(), 2)] = True
            return draw_cost(stage.requests, pair, stage.blocks, 0.0, draw)
        if mode == "random":
            return int(draw.choice(np.flatnonzero(allowed).tolist()))
        places = np.flatnonzero(allowed)
        self._turns[name] = int(places[np.searchsorted(places, self._turns[name], "right") % len(places)])
        return self._turns[name]

    def _mode(self, request: RoutingRequest) -> RoutingMode:
        """Return the mode that the request, or else the deployment, chooses."""
        mode = request.options.routing.mode or self.mode
        if mode != self.mode:
            if mode == "kv" and self._holdings is None:
                raise RequestError("routing.mode: kv; this deployment does not follow what workers hold (router.mode)")
            if mode in ("least_loaded", "power_of_two") and not self._counts_load:
                raise RequestError(f"routing.mode: {mode}; this deployment does not follow workers' load (router.mode)")
        if mode == "direct" and not request.is_resumed and request.wanted("decode") == ANYBODY:
            raise RequestError(
                "routing.decode_worker: missing; this deployment's clients choose their worker, send one"
            )
        return mode

    def _named(self, name: str, worker: str, rank: int | None, reach: Mask | None) -> Mask:
        """Return the workers that a request asks for."""
        stage = self._stages[name]
        found = stage.is_of(worker, rank)
        ready = found & stage.is_ready
        able = ready if reach is None else ready & reach
        if able.any():
            return able
        if worker not in ("", *stage.workers):
            known = ", ".join(sorted(set(stage.workers))[:8])
            raise RequestError(f"routing.{name}_worker: no worker {worker[:100]!r}; there are {known or 'none'}")
        if not found.any():
            raise RequestError(f"routing.{name}_dp_rank: {rank}; no such rank of {worker or 'any worker'}")
        if not ready.any():
            raise UnavailableError(f"routing.{name}_worker: {worker or 'all'} takes no new requests; choose another")
        raise RequestError(
            f"routing.{name}_worker: the KV of {worker or 'all'} can't get to the decode worker;"
            " name two on one host, or one of them alone"
        )

    def _not_busy(self, name: str, allowed: Mask, request: RoutingRequest, now: float) -> Mask:
        """Return the allowed that are not busy by the request's rules. Raises ResourceExhaustedError when all are."""
        live = live_settings.current().busy
        bounds = self._config.busy if live is None else live
        rules = [rule for rule in bounds if request.options.priority <= rule.up_to_priority]
        if request.is_resumed or not rules:
            return allowed
        busy_s = self._stages[name].busy_s(rules, now)
        free: Mask = allowed & (busy_s == 0)
        if not free.any():
            retry_s = min(max(1, math.ceil(busy_s[allowed].min())), MAX_RETRY_S)
            raise ResourceExhaustedError(
                f"{name}: all {np.count_nonzero(allowed)} workers are busy (router.busy); try again in {retry_s} s",
                retry_after_s=retry_s,
            )
        return free

    def _of_generation(self, stage: StageTargets, allowed: Mask, request: RoutingRequest, wanted: int | None) -> Mask:
        """Return the allowed of one generation: of the wanted, or of one by the weights of those that are allowed."""
        generations = stage.generations
        if generations is None:
            return allowed
        present = set(generations[allowed].tolist())
        wanted = request.options.routing.generation if wanted is None else wanted
        if wanted not in present:
            weights = {generation: weight for generation, weight in stage.weights.items() if generation in present}
            wanted = choose(weights, request.options.session_id, self._draw)
        mask: Mask = allowed & (generations == wanted)
        return mask

    def choose_generation(self, session_id: str, wanted: int | None = None) -> int | None:
        """Return where a request is to begin that other stages see before decode; None: there is only one."""
        decode = self._stages["decode"]
        if wanted in decode.weights:
            return wanted
        return choose(decode.weights, session_id, self._draw) if decode.generations is not None else None

    def _reach(self, name: str, other: WorkerRecord) -> Mask:
        """Return which of a stage's workers can give KV to a worker of the other stage, or take its KV."""
        records = [target.record for target in self._stages[name].targets]
        pairs = [(record, other) if name == "prefill" else (other, record) for record in records]
        return np.array([can_transfer(*pair) for pair in pairs], bool)

    def _is_short(self, request: RoutingRequest, decode: StageChoice, sources: Mask, now: float) -> bool:
        """Whether it costs all requests together less if decode computes what it lacks of the prompt.

        By what both sides have measured, else by the recipe's prices: its own time against a transfer's.
        """
        config, capacity = self._config, decode.target.record.capacity
        if self._must_transfer:
            return False
        num_new = len(request.prompt) - (decode.cached_tokens or 0)
        prices = decode.target.report.prices if decode.target.report is not None else None
        if prices is not None and config.transfer_ms:
            prefill = self._cheapest_source(request, sources & self._reach("prefill", decode.target.record), now)
            if prefill is not None:
                stage, at = self._stages["decode"], decode.target.index
                step_tokens = _step_tokens(decode.target)
                prices = believed(prices, prefill.prices, step_tokens)
                here = PromptSide(prices, num_new, float(stage.waiting_tokens(now)[at]), step_tokens)
                start_ms, slope = 0.0, config.transfer_ms_per_token
                if prices.transfer_start_ms >= 0:
                    start_ms, slope = prices.transfer_start_ms, prices.transfer_ms_per_token
                transfer = Transfer(config.transfer_ms, start_ms, slope)
                return is_decode_cheaper(here, float(stage.requests[at]), prefill, transfer)
        if capacity is not None and num_new > capacity.max_num_tokens:
            return False
        return num_new * config.prefill_ms_per_token < config.transfer_ms + num_new * config.transfer_ms_per_token

    def _cheapest_source(self, request: RoutingRequest, allowed: Mask, now: float) -> PromptSide | None:
        """Return the prefill worker with the least to do until it has the prompt; None: none tells its prices."""
        stage = self._stages["prefill"]
        told = [target.report.prices if target.report is not None else None for target in stage.targets]
        able = allowed & np.array([prices is not None for prices in told], bool)
        if not able.any():
            return None
        hashes = self._hash_prompt and self._hash_prompt(request, stage.tokens_per_block)
        held, _ = self._held(stage, request, hashes)
        waiting, new = stage.waiting_tokens(now), np.maximum(len(request.prompt) - held * stage.tokens_per_block, 1.0)
        at = int(np.where(able, waiting + new, np.inf).argmin())
        prices = told[at]
        assert prices is not None
        return PromptSide(prices, float(new[at]), float(waiting[at]), _step_tokens(stage.targets[at]))

    def _prices(self, stage: str, has_prefill: bool) -> Prices:
        config = self._config
        if stage == "prefill":
            return Prices(config.prefill_weight, config.waiting_weight, 0.0)
        if not has_prefill:
            return Prices(config.prefill_weight, config.waiting_weight, config.decode_weight)
        share = config.transfer_ms_per_token / config.prefill_ms_per_token if config.prefill_ms_per_token else 0.0
        return Prices(config.prefill_weight * share, 0.0, config.decode_weight)

    def _held(self, stage: StageTargets, request: RoutingRequest, hashes: Hashes | None) -> tuple[Floats, Floats]:
        """Return how many of the prompt's blocks each worker holds: lower tiers' at their credit, and in any tier."""
        if self._holdings is None or hashes is None:
            nothing = np.zeros(len(stage.targets))
            return nothing, nothing
        device, host, anywhere = self._holdings.match(hashes, stage.keys)
        if not (device != anywhere).any():  # nothing lies in lower tiers alone
            return device, anywhere
        credit = self._config.host_credit * (host - device) + self._config.disk_credit * (anywhere - host)
        return device + credit, anywhere

    def _costs(
        self,
        stage: StageTargets,
        prices: Prices,
        request: RoutingRequest,
        hashes: Hashes | None,
        held: Floats,
        now: float,
    ) -> Floats:
        """Return each worker's cost of this request, in KV blocks."""
        size = stage.tokens_per_block
        new = (len(request.prompt) / size - held) * stage.block_prices
        waiting = stage.waiting_tokens(now) / size
        hashes = NO_BLOCKS if hashes is None else hashes
        if prices.waiting and len(hashes):  # a prompt does not queue behind its own beginning: it needs that anywhere
            waiting = np.maximum(waiting - stage.computing_blocks(hashes, held), 0.0)
        if prices.new == prices.waiting:  # what is held saves at the most what there is to do
            costs = prices.new * np.maximum(new + waiting, 0.0)
        else:
            costs = prices.new * new + prices.waiting * waiting
        if prices.used:
            # What other routers' requests use there may be this prompt's blocks, as far as the worker holds them.
            shared = np.maximum(stage.shared_blocks(hashes), np.minimum(np.floor(held), stage.other_blocks))
            costs += prices.used * (stage.blocks + len(hashes) - shared)
        return costs

    def _down(self, now: float) -> set[str]:
        if not self._down_until and not self._silent:
            return set()
        self._down_until = {worker: until for worker, until in self._down_until.items() if until > now}
        return self._down_until.keys() | self._workers_of(self._silent)

    def _workers_of(self, servers: Collection[str]) -> set[str]:
        return {worker for worker in self._records if split_worker(worker)[1] in servers}

    def _forget_losses(self, worker: str) -> None:
        del self._skip_s[worker]
        self._down_until.pop(worker, None)


def _life(workers: Mapping[str, WorkerRecord], worker: str) -> int:
    return workers[worker].life if worker in workers else 0


def _count_flow(flows: dict[tuple[str, str], Flow], decision: Decision, request: RoutingRequest) -> None:
    prefill, decode = decision.prefill, decision.decode
    way = (prefill.target.worker if prefill is not None else "", decode.target.worker)
    flow = flows.setdefault(way, Flow())
    flow.num_requests += 1
    flow.prompt_tokens += len(request.prompt)
    flow.cached_tokens += (prefill or decode).cached_tokens or 0


def draw_cost(costs: Floats, allowed: Mask, ties: Floats, temperature: float, draw: random.Random) -> int:
    """Return one of the allowed: of the lowest costs that with the lowest `ties`, or by a softmax of the costs.

    Probabilities are proportional to exp(-cost / (highest - lowest) / temperature), as in Dynamo's router.
    """
    if temperature:
        places = np.flatnonzero(allowed)
        some = costs[places]
        low, span = some.min(), float(np.ptp(some))
        weights = np.exp(-(some - low) / span / temperature) if span > _EVEN else np.ones(len(places))
        return int(draw.choices(places.tolist(), weights.tolist())[0])
    costs = np.where(allowed, costs, np.inf)
    cheapest = (costs <= costs.min() + _EVEN).nonzero()[0]
    if len(cheapest) > 1:
        second = ties[cheapest]
        cheapest = cheapest[second <= second.min() + _EVEN]
    return int(draw.choice(cheapest.tolist()))


def _sent(choice: StageChoice, request: RoutingRequest, is_used: bool, is_computed: bool) -> SentRequest:
    """Return what a worker is sent: a prompt whose blocks it uses from now on, that it computes, or both."""
    hashes = choice.hashes if choice.hashes is not None else NO_BLOCKS
    used = hashes if is_used else NO_BLOCKS
    num_cached = choice.cached_tokens or 0
    num_new = len(request.prompt) - num_cached
    num_held = num_cached // (choice.target.record.tokens_per_block or DEFAULT_TOKENS_PER_BLOCK) if num_cached else 0
    missing = hashes[num_held:]
    if not is_computed:
        return SentRequest(used, 0, num_new=len(missing))
    return SentRequest(used, num_new, missing, len(request.prompt), len(missing))


def _step_tokens(target: Target) -> int:
    capacity = target.record.capacity
    return capacity.max_num_tokens if capacity is not None else _STEP_TOKENS


def _cached_tokens(stage: StageTargets, request: RoutingRequest, num_blocks: float) -> int:
    """Return the tokens that an engine takes from its cache: it computes at least the last one."""
    size = stage.tokens_per_block
    return min(int(num_blocks), (len(request.prompt) - 1) // size) * size
