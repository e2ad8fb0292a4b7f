"""Say what a load needs: how many workers, whether prefill apart pays, what to expect, and what would change that.

    python tools/advise.py --isl 2000 --osl 200 --rate 8 --ttft-ms 500 --itl-ms 20 --times h100-8b-bf16 --gpus 4
    python tools/advise.py log/requests.*.jsonl* --ttft-ms 1000 --itl-ms 25 --times decode.step_times.json --gpus 8
    python tools/advise.py day.jsonl --ttft-ms 1000 --itl-ms 25 --times h100-8b-bf16 --recipe FOLDER --recipe FOLDER
    python tools/advise.py requests.jsonl --ttft-ms 500 --itl-ms 20 --recipe recipes/a --write
    python tools/advise.py --metrics metrics.txt --rate 8 --ttft-ms 500 --itl-ms 20 --times h100-8b-bf16
    python tools/advise.py --prometheus http://127.0.0.1:9090 --hours 24 --ttft-ms 500 --itl-ms 20 --times t.json

The load is a trace, as tools/simulate.py reads them (the request log, Dynamo's, Mooncake's), of which the busiest
stretch counts; or lengths and a rate, given or measured. Layouts of up to --gpus workers, one on each GPU, are
simulated with a table of step times (docs/sizing.md); without --times they are fitted to the request log. The answer
comes first, then what was compared; --json adds one JSON document as the last line. --write sets what was measured in
the recipes' blocks `router`; comments stay.

Exit codes: 0 something holds the target; 1 nothing does; 2 an option, a file or a recipe is wrong, or time too short.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from benchmarks.options import count, not_negative, positive, positive_count, share
from bireme.config import Recipe, RouterConfig
from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe
from bireme.sizing import advice, recipe_constants
from bireme.sizing.advice import (
    Bench,
    Expected,
    Layout,
    LayoutChoice,
    LayoutFigures,
    OutOfTimeError,
    Question,
    Reason,
    ServiceTarget,
    Way,
)
from bireme.sizing.log_times import log_times, read_log
from bireme.sizing.simulator.cluster import ClusterSettings
from bireme.sizing.simulator.trace import Trace, read_traces, spread_out
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import NO_TRANSFER, StepTimes, TransferTimes, published
from tools.advising import measured_load

HELD, LOST, WRONG = 0, 1, 2
# Where a table does not tell: what router.transfer_ms and router.transfer_ms_per_token assume
ASSUMED = TransferTimes(start_ms=4.0, bytes_per_token=2, bytes_per_s=1e6)
KV_TOKENS = 400_000
LIMITS = {"max_num_tokens": 8192, "max_batch_size": 256}
COLUMNS = {
    "ttft_p50_ms": "TTFT p50", "ttft_p90_ms": "p90 ms", "itl_p50_ms": "ITL p50", "itl_p90_ms": "p90 ms",
    "good_share": "good", "goodput_per_s": "goodput/s", "tokens_per_s": "tokens/s",
}  # fmt: skip


@dataclasses.dataclass(slots=True)
class Advice:
    """All that is told."""

    load: str
    choice: LayoutChoice
    error: float  # of the step times, relative, at the median
    expected: Expected
    recipes: dict[str, LayoutFigures]
    changes: dict[str, LayoutChoice]
    bigger: LayoutFigures | None  # with a GPU more
    left_out: list[str]
    constants: dict[str, float]
    notes: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check(options)
        take_metrics(options)
        recipes = {folder: load_recipe(folder) for folder in options.recipe}
        trace = read_load(options)
        measured = read_times(options)
        found = advise(options, trace, measured, recipes)
        said = write(options, found, measured, recipes)
    except (ConfigError, ValueError, OSError) as error:
        print(f"advise: {error}", file=sys.stderr)
        return WRONG
    except OutOfTimeError:
        remedy = "give more, or fewer --requests or --gpus"
        print(f"\nadvise: --seconds {options.seconds:g}: over before there is an answer; {remedy}", file=sys.stderr)
        return WRONG
    print(text_of(found, options))
    for line in said:
        print(line)
    if options.json:
        print(json.dumps(document(found, options)))
    return HELD if found.choice.best.is_held else LOST


def advise(
    options: argparse.Namespace, trace: Trace | None, measured: Measured, recipes: Mapping[str, Recipe]
) -> Advice:
    """Raises OutOfTimeError before there is an answer; what would change it is left out when time is over."""
    times = measured.times
    question = Question(ServiceTarget(options.ttft_ms, options.itl_ms, options.share))
    if trace is None:
        loads = advice.loads_of_lengths(
            options.isl, options.osl, options.variation, options.rate, options.requests, options.prefix
        )
        size = advice.TOKENS_PER_BLOCK
    else:
        loads, size = advice.loads_of_trace(trace, options.requests), trace.tokens_per_block
    requests = loads(0, 1.0)
    seconds = max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
    prompt, answer = (
        sum(values) / len(requests)
        for values in zip(*((one.num_prompt, one.num_output) for one in requests), strict=True)
    )
    rate = len(requests) / seconds
    stretch = f", the busiest {len(requests):,} of {len(trace.requests):,}" if trace else ""
    load = f"{rate:.3g} requests/s of {prompt:,.0f} tokens with answers of {answer:,.0f}{stretch}"
    rows = rate * answer * options.itl_ms / 1e3 / options.gpus  # Little's law, at the target
    rows = min(max(round(rows), 1), LIMITS["max_batch_size"])
    chunk = min(max(round(prompt), 1), LIMITS["max_num_tokens"])
    constants = advice.constants_of(times, rows, chunk, round(prompt + answer / 2), measured.hop_ms)
    settings = settings_of(options, measured, size, constants, recipes)
    progress, least = Progress(options.seconds), options.gpus if options.all else 1
    bench = Bench(loads, settings, progress.until, show=progress)
    try:
        progress.what = "which layout"
        choice = advice.choose(bench, question, least, options.gpus, options.draws, times.error)
        progress.what = "what to expect"
        expected = advice.expect(bench, question, choice.best.layout, options.draws, times.error)
        progress.what = "recipes"
        told = {
            folder: bench.run(with_recipe(settings["apart"], recipe, times, size), layout_of(recipe), question)
            for folder, recipe in recipes.items()
        }
        found = Advice(load, choice, times.error, expected, told, {}, None, [], constants, list(measured.notes))
        explore(bench, question, options, found, progress)
    finally:
        progress.end()
    found.notes.append(f"{bench.num_runs} simulations in {time.monotonic() - progress.began:.0f} s")
    return found


def explore(bench: Bench, question: Question, options: argparse.Namespace, found: Advice, progress: Progress) -> None:
    """Ask the neighbors of the question."""
    asked = advice.neighbors(question)
    layout, least = found.choice.best.layout, options.gpus if options.all else 1
    try:
        progress.what = "a GPU more"
        found.bigger = advice.best_of(bench, question, layout.way, layout.gpus + 1)
        for name, other in asked.items():
            progress.what = name
            found.changes[name] = advice.choose(bench, other, least, options.gpus)
    except OutOfTimeError:
        found.left_out = [name for name in asked if name not in found.changes]


def settings_of(
    options: argparse.Namespace,
    measured: Measured,
    size: int,
    constants: Mapping[str, float],
    recipes: Mapping[str, Recipe],
) -> dict[Way, ClusterSettings]:
    """Return each way's: engines' limits are those of the first recipe of that way, else of any, else defaults."""
    kv_blocks, times = max(options.kv_tokens // size, 1), measured.times
    engine = SimulatedEngine(times, kv_blocks, size, LIMITS["max_num_tokens"], LIMITS["max_batch_size"])
    router = msgspec.structs.replace(RouterConfig(), **constants)
    hop_s = (measured.hop_ms or 0.0) / 1e3
    base = ClusterSettings(prefill=engine, decode=engine, router=router, hop_s=hop_s)
    found: dict[Way, ClusterSettings] = {}
    for way in advice.WAYS:
        ordered = sorted(recipes.values(), key=lambda recipe: layout_of(recipe).way != way)
        found[way] = with_recipe(base, ordered[0], times, size, constants) if ordered else base
    return found


def with_recipe(
    base: ClusterSettings, recipe: Recipe, times: StepTimes, size: int, constants: Mapping[str, float] | None = None
) -> ClusterSettings:
    """Take a recipe's limits and its router, with measured constants where they are given."""
    engines = {"decode": base.decode, "prefill": base.prefill}
    for stage, entry in recipe.workers.items():
        if stage in engines:
            config, old = entry.engine_config, engines[stage]
            kv_tokens = config.kv_cache_config.max_tokens
            engines[stage] = dataclasses.replace(
                old,
                num_blocks=max(kv_tokens // size, 1) if kv_tokens else old.num_blocks,
                max_num_tokens=config.max_num_tokens or old.max_num_tokens,
                max_batch_size=config.max_batch_size or old.max_batch_size,
            )
    if "prefill" not in recipe.workers:
        engines["prefill"] = engines["decode"]
    measured = {
        key: value for key, value in (constants or {}).items() if key != "transfer_ms" or recipe.router.transfer_ms
    }
    return dataclasses.replace(
        base,
        **engines,
        router=msgspec.structs.replace(recipe.router, **measured),
        enforce_disaggregation=recipe.pipeline.enforce_disaggregation,
    )


def layout_of(recipe: Recipe) -> Layout:
    counts = [len(recipe.replicas(stage)) for stage in ("prefill", "decode")]
    return Layout(*counts)


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    measured = options.metrics or options.prometheus
    if bool(options.requests_from) + bool(options.metrics) + bool(options.prometheus) > 1:
        raise ConfigError("a trace, --metrics, --prometheus: one of them; each has lengths of its own")
    if measured and (options.isl is not None or options.osl is not None):
        raise ConfigError("--isl, --osl: metrics have their own lengths; leave out one or the other")
    if options.times is None and not options.requests_from:
        raise ConfigError(f"--times: needed without a request log; a file, or one of {', '.join(published())}")
    if options.save_times and options.times is not None:
        raise ConfigError("--save-times: keeps what is fitted to a request log; leave out --times")
    if options.write and not options.recipe:
        raise ConfigError("--write: needs --recipe FOLDER, the recipe to write to")
    if not measured:
        _check_lengths(options)


def _check_lengths(options: argparse.Namespace) -> None:
    """Raises ConfigError where lengths are given beside a trace, or are missing without one."""
    lengths = {"--isl": options.isl, "--osl": options.osl, "--rate": options.rate}
    given = [name for name, value in lengths.items() if value is not None]
    if options.requests_from and given:
        raise ConfigError(f"{', '.join(given)}: a trace has its own lengths and rate; leave out one or the other")
    if not options.requests_from and len(given) < len(lengths):
        missing = ", ".join(name for name in lengths if name not in given)
        raise ConfigError(f"{missing}: needed without a trace; or name the files of a request log")
    if options.prefix and not options.requests_from and options.prefix >= options.isl:
        raise ConfigError(f"--prefix {options.prefix}: shorter than --isl {options.isl:g}, the mean prompt")


def take_metrics(options: argparse.Namespace) -> None:
    """Set lengths and rate by metrics, where they are named. What caches had is the prefix of all prompts.

    Raises ConfigError and OSError.
    """
    options.load_note = ""
    if options.metrics:
        found = measured_load.of_pages(options.metrics, options.apart_s)
    elif options.prometheus:
        found = measured_load.of_prometheus(options.prometheus, options.hours, options.stretch_s, options.match)
    else:
        return
    if options.rate is None and found.requests_per_s is None:
        raise ConfigError("--rate: one metrics page tells lengths alone; give it, or a later page and --apart-s")
    options.isl, options.osl = max(found.prompt_tokens, 1.0), max(found.output_tokens, 1.0)
    options.rate = options.rate or found.requests_per_s
    options.prefix = options.prefix or min(round(found.cached_tokens), math.ceil(options.isl) - 1)
    options.load_note = (
        f"lengths are of {found.said}: means alone, so --variation {options.variation:g} is assumed, and what caches"
        f" had ({options.prefix:,} tokens a prompt) is taken to begin all prompts"
    )


def read_load(options: argparse.Namespace) -> Trace | None:
    """None: lengths are given. Raises ValueError for a trace that can't be read."""
    if not options.requests_from:
        return None
    trace = read_traces([Path(path) for path in options.requests_from])
    if not trace.requests:
        raise ValueError(f"{' '.join(options.requests_from)}: no requests; name files of a request log or a trace")
    if len(trace.requests) < 2 or not trace.requests[-1].arrival_s:
        raise ValueError(
            f"{' '.join(options.requests_from)}: {len(trace.requests)} requests at one time; a rate needs more"
        )
    return Trace(spread_out(trace.requests), trace.tokens_per_block)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Step times, and which of what the router's prices are made of was measured."""

    times: StepTimes
    hop_ms: float | None
    has_transfer: bool
    source: str
    notes: list[str]


def read_times(options: argparse.Namespace) -> Measured:
    """Return step times with transfers, and what was assumed. Raises ConfigError, ValueError, OSError."""
    hop_ms, notes = options.hop_ms, [options.load_note] if options.load_note else list[str]()
    if options.times is None:
        found = log_times(read_log([Path(path) for path in options.requests_from]))
        times, source = found.times, "the request log"
        notes.append(
            f"step times are fitted to {found.num_gaps:,} answers and {found.num_prompts:,} prompts of the request log,"
            f" within {times.error:.0%} at the median; tools/record_steps.py makes a better table"
        )
        if hop_ms is None:
            hop_ms = float(f"{found.hop_ms:.3g}")
            notes.append(f"--hop-ms {hop_ms:g} is from the request log: TTFT beyond queue, prompt and transfer")
        if options.save_times:
            times.write(Path(options.save_times))
    else:
        times, source = StepTimes.read(options.times), options.times
    if not (has_transfer := times.table.transfer != NO_TRANSFER):
        times = dataclasses.replace(times, table=msgspec.structs.replace(times.table, transfer=ASSUMED))
        notes.append(
            f"{source} does not tell what transfers take: {ASSUMED.start_ms:g} ms and 0.002 ms a token assumed"
        )
    if hop_ms is None:
        notes.append("--hop-ms is not given: what servers and the client add to TTFT is left out")
    return Measured(times, hop_ms, has_transfer, source, notes)


def write(options: argparse.Namespace, found: Advice, measured: Measured, recipes: Mapping[str, Recipe]) -> list[str]:
    """Return what was set, and what to look at. Raises ConfigError."""
    if not options.write:
        return []
    said = []
    constants = dict(found.constants)
    if not measured.has_transfer:  # what is assumed is not measured
        constants = {key: value for key, value in constants.items() if not key.startswith("transfer")}
    for folder, recipe in recipes.items():
        if layout_of(recipe).way == "aggregated":
            said.append(f"{folder}: nothing to set, it has no prefill apart")
            continue
        if not recipe_constants.is_made(Path(recipe.folder)):
            said.append(
                f"{folder}: warning: neither tools/make_recipe.py nor this program has made it; see that"
                f" {measured.source} is of its model, engine and machine"
            )
        lines = recipe_constants.write(Path(recipe.folder), constants, measured.source)
        said += [f"{folder}: {line}" for line in lines or ["as measured already"]]
    return said


# What is told


def text_of(found: Advice, options: argparse.Namespace) -> str:
    lines = [answer_of(found, options), "", f"Load: {found.load}.", "", *table_of(found)]
    lines += ["", "What would change the answer:", *changes_of(found)]
    if found.recipes:
        lines += ["", recipes_of(found)]
    prices = ", ".join(f"{key}: {value:g}" for key, value in found.constants.items())
    lines += ["", f"Prices of the router, by these step times: {prices}"]
    return "\n".join([*lines, *(f"Note: {note}." for note in found.notes)])


def answer_of(found: Advice, options: argparse.Namespace) -> str:
    choice, expected = found.choice, found.expected
    best, layout = choice.best, choice.best.layout
    target = f"TTFT {options.ttft_ms:g} ms and ITL {options.itl_ms:g} ms for {options.share:.0%} of requests"
    if best.is_held:
        holds = "holds" if layout == Layout(0, 1) else "hold"
        head = f"{words(layout)} {holds} the target ({target})."
        if not expected.is_always_held:
            head += " Just so: not with all arrivals, or within the error of the step times. Take a GPU more."
    else:
        head = f"No layout of up to {options.gpus} GPUs holds the target ({target}); nearest are {words(layout)}."
    figures = (
        f"Expect TTFT {expected.ttft_p50_ms.text('.0f')} ms (p90 {expected.ttft_p90_ms.text('.0f')}), "
        f"ITL {expected.itl_p50_ms.text('.1f')} ms (p90 {expected.itl_p90_ms.text('.1f')}), "
        f"goodput {expected.goodput_per_s.text('.3g')} of {best.rate:.3g} requests/s "
        f"({expected.good_share.text('.0%')} within the target)."
    )
    return f"{head}\n{pays(choice, found.error)}\n{figures}"


def pays(choice: LayoutChoice, error: float) -> str:
    layout = choice.best.layout
    if choice.other is None or choice.ratio is None:
        return (
            "Prefill apart does not pay: it needs two GPUs at least, and one is enough."
            if choice.best.is_held
            else ("Prefill apart needs two GPUs at least.")
        )
    beyond = 0.999 * advice.MOST_SPEED * choice.best.rate  # where the search has ended
    rates = {
        way: f"{rate.text('.3g')} requests/s{' and more' if rate.high >= beyond else ''}"
        for way, rate in choice.rates.items()
    }
    apart = choice.best if choice.is_apart else choice.other
    compared = (
        f"on {layout.gpus} GPUs {apart.layout} holds it up to {rates['apart']}, aggregated up to {rates['aggregated']}"
    )
    if choice.reason is Reason.CLOSE:
        taken = (
            "prefill apart is named since it holds the target as told"
            if choice.is_apart
            else "aggregated has fewer parts"
        )
        return (
            f"Whether prefill apart pays is too close to call, step times are told within {error:.1%}: {compared};"
            f" {taken}. A table by tools/record_steps.py from your own load decides, or tools/sweep.py on so many GPUs."
        )
    if choice.is_apart:
        return f"Prefill apart pays: {compared}."
    if choice.reason is Reason.EQUAL:
        return f"Prefill apart does not pay, both are about equal and aggregated has fewer parts: {compared}."
    return f"Prefill apart does not pay: {compared}."


def words(layout: Layout) -> str:
    if layout.prefill:
        return f"{layout.gpus} GPUs, {layout.prefill} for prefill and {layout.decode} for decode ({layout}),"
    return f"{layout.decode} aggregated worker{'s' if layout.decode > 1 else ''}"


def table_of(found: Advice) -> list[str]:
    choice = found.choice
    rows = {"the answer": choice.best, "other way": choice.other, "a GPU more": found.bigger} | found.recipes
    width = max(map(len, rows)) + 2
    lines = [f"{'':<{width}}{'layout':>8}{'GPUs':>6}" + "".join(f"{title:>11}" for title in COLUMNS.values())]
    for name, row in rows.items():
        if row is not None:
            cells = "".join(
                f"{value:>11.1%}" if key == "good_share" else f"{value:>11,.3g}" if value < 100 else f"{value:>11,.0f}"
                for key in COLUMNS
                if (value := getattr(row, key)) is not None
            )
            lines.append(f"{name:<{width}}{row.layout!s:>8}{row.layout.gpus:>6}{cells}")
    return lines


def changes_of(found: Advice) -> list[str]:
    lines = []
    best, bigger = found.choice.best, found.bigger
    for name, choice in found.changes.items():
        layout = choice.best.layout
        if not choice.best.is_held:
            said = f"no layout holds the target; nearest {words(layout).rstrip(',')}, {choice.best.good_share:.0%} good"
        elif layout == best.layout and best.is_held:
            said = "the same"
        else:
            said = words(layout).rstrip(",")
        lines.append(f"  {name + ':':<24}{said}")
    if bigger is not None:
        ways = f"TTFT p90 {bigger.ttft_p90_ms:.0f} ms for {best.ttft_p90_ms:.0f}, ITL p90 {bigger.itl_p90_ms:.1f} for"
        said = f"{words(bigger.layout).rstrip(',')}: {ways} {best.itl_p90_ms:.1f}, {bigger.good_share:.0%} good"
        lines.append(f"  {'a GPU more:':<24}{said}")
    if found.left_out:
        lines.append(f"  no time was left for: {', '.join(found.left_out)} (--seconds)")
    return lines


def recipes_of(found: Advice) -> str:
    best = chosen_recipe(found)
    row, layout = found.recipes[best], found.choice.best.layout
    if row.is_held:
        return f"Of the given recipes take {best}: it holds the target as it stands ({row.layout})."
    likest = f"{best}, the best of those given, does not hold the target as it stands ({row.layout})"
    return f"{likest}; give it {words(layout).rstrip(',')}."


def chosen_recipe(found: Advice) -> str:
    """Return the one that holds the target with the fewest GPUs, else with the most good requests."""
    way = found.choice.best.layout.way

    def merit(folder: str) -> tuple[float, ...]:
        row = found.recipes[folder]
        if row.is_held:
            return 1, -row.layout.gpus, row.layout.way == way, -row.ttft_p90_ms
        return 0, row.layout.way == way, row.good_share

    return max(found.recipes, key=merit)


def document(found: Advice, options: argparse.Namespace) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(found)
    tree["disaggregation_pays"] = None if found.choice.reason is Reason.CLOSE else found.choice.is_apart
    tree["held"] = found.choice.best.is_held
    tree["recipe"] = chosen_recipe(found) if found.recipes else None
    tree["target"] = {"ttft_ms": options.ttft_ms, "itl_ms": options.itl_ms, "share": options.share}
    return finite(tree)


def finite(tree: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


class Progress:
    """On a terminal a line that is written over; into a file one a quarter of a minute: how much time is spent."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.began = self._shown_at = time.monotonic()
        self.until, self.what = self.began + seconds, ""
        self._is_terminal = sys.stderr.isatty()
        self._gap_s = 0.2 if self._is_terminal else 15.0

    def __call__(self, layout: Layout) -> None:
        now = time.monotonic()
        if now - self._shown_at < self._gap_s:
            return
        self._shown_at = now
        spent = now - self.began
        said = f"{spent:.0f} of at most {self._seconds:.0f} s: {self.what}, {layout}"
        if self._is_terminal:
            bar = "#" * int(30 * min(spent / self._seconds, 1))
            print(f"\r[{bar:<30}] {said}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(said, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("requests_from", nargs="*", metavar="FILE", help="of a trace, as it is or .gz")
    add("--isl", type=positive, metavar="TOKENS", help="without a trace: of a prompt, in the mean")
    add("--osl", type=positive, metavar="TOKENS", help="of an answer")
    add("--rate", type=positive, metavar="N", help="requests a second, at random times")
    add("--variation", type=not_negative, default=0.5, help="of lengths: deviation over mean; 0: all are alike")
    add("--prefix", type=count, default=0, metavar="TOKENS", help="with which all prompts begin")
    add("--ttft-ms", type=positive, required=True, metavar="MS", help="target: the first token")
    add("--itl-ms", type=positive, required=True, metavar="MS", help="target: the mean gap between a request's tokens")
    add("--share", type=share, default=0.9, help="of requests that must be within both")
    add("--metrics", nargs="+", default=[], metavar="FILE", help="in place of lengths: a metrics page, or two")
    add("--apart-s", type=positive, metavar="S", help="between two pages of --metrics, for the rate")
    add("--prometheus", metavar="URL", help="in place of lengths: a Prometheus server that scrapes the deployment")
    add("--hours", type=positive, default=24.0, metavar="H", help="of --prometheus, up to now")
    add("--stretch-s", type=positive, default=300.0, metavar="S", help="of these the busiest counts")
    add("--match", default="", metavar="LABELS", help="of its series, as in 'instance=\"a:8002\"'")
    add("--times", metavar="FILE", help=f"step times, or one of {', '.join(published())}; else fitted to the log")
    add("--save-times", metavar="FILE", help="write what was fitted to the request log, for other tools' --times")
    add("--gpus", type=positive_count, default=8, metavar="N", help="at most, a worker on each")
    add("--all", action="store_true", help="of --gpus at once, not the fewest that hold the target")
    add("--kv-tokens", type=positive_count, default=KV_TOKENS, metavar="N", help="that a worker's KV pool holds")
    add("--hop-ms", type=not_negative, metavar="MS", help="to a worker and back, beside its work")
    add("--recipe", action="append", default=[], metavar="FOLDER", help="to choose from; its limits count")
    add("--write", action="store_true", help="set measured constants in --recipe")
    add("--requests", type=positive_count, default=1500, metavar="N", help="of a simulation, a minute's at least")
    add("--draws", type=positive_count, default=3, metavar="N", help="of arrivals")
    add("--seconds", type=positive, default=300.0, metavar="S", help="that all may take")
    add("--json", action="store_true", help="end with one JSON document")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
