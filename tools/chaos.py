"""Hit a launch with random faults under checked load; see that it heals, and that readiness tells the truth.

Starts tools/serve.py as a user would, loads it through every way in, each answer checked token by token, and does
one fault after the other: processes killed, ended, paused and hung, files deleted, /dev/shm full, descriptors used
up, a log that nobody reads, clients that send rubbish or leave. After each it waits until all is well again.

Fails, with exit code 1, on a wrong token; a request that hangs, but of a client that called a dead stub itself; a
request that fails though somebody could have served it; readiness that says ready for more than five seconds while
a way in answers nothing; a fault that does not heal; anything left behind. The same --seed gives the same faults.

    python tools/chaos.py --seconds 1200                                  # five minutes for each topology
    python tools/chaos.py --topology mocker-2+2 --seconds 120 --seed 7
    python tools/chaos.py --topology tiny-1+1 --faults engine_killed,engine_ended --seconds 60
    python tools/chaos.py --topology cluster --streams 25 --seconds 600   # several servers, frontends and a real etcd
    python tools/chaos.py --plan 10 --seed 7                              # only say what would be done

Progress goes to stderr, then a table; the very last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chaos import cluster_campaign
from benchmarks.chaos.campaign import Campaign, CampaignSettings, Outcome
from benchmarks.chaos.faults import KINDS, plan
from benchmarks.chaos.topologies import TOPOLOGIES
from benchmarks.load.meter import percentile
from benchmarks.options import chosen

_SHOWN = 40  # violations in the table's list; the JSON has all


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # launches end with the campaign, as at Ctrl-C
    topologies = [TOPOLOGIES[name] for name in options.topology if name != cluster_campaign.NAME]
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    if options.plan:
        for topology in topologies:
            for fault in itertools.islice(plan(options.seed, topology, options.faults), options.plan):
                print(f"{topology.name}: {fault}")
        return 0
    seconds = options.seconds / len(options.topology)
    settings = CampaignSettings(options.seed, seconds, tuple(options.faults), options.streams)
    folder = Path(options.keep or tempfile.mkdtemp(prefix="bireme-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [Campaign(topology, settings, folder, say).run() for topology in topologies]
    if cluster_campaign.NAME in options.topology:
        outcomes.append(cluster_campaign.ClusterCampaign(settings, folder, say).run())
    return conclude(outcomes, folder, {"seed": options.seed, "seconds": options.seconds})


def conclude(outcomes: Sequence[Outcome], folder: Path, asked: Mapping[str, Any]) -> int:
    """Print the table, the violations and the JSON; return the exit code."""
    print_result(outcomes)
    has_failed = any(outcome.violations for outcome in outcomes)
    print(f"chaos failed; the launches' logs are in {folder}" if has_failed else "chaos passed")
    print(json.dumps({**asked, **document(outcomes)}, separators=(",", ":")))
    return 1 if has_failed else 0


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def print_result(outcomes: Sequence[Outcome]) -> None:
    print(
        f"{'fault':<22} {'times':>5} {'recovery p50':>13} {'p99':>7} {'longest lie':>12}  requests meanwhile; outcome"
    )
    for row in rows(outcomes):
        times = f"{row['recovery_p50_s']:>11.1f} s {row['recovery_p99_s']:>5.1f} s" if row["recovery_p50_s"] else ""
        bad = ", ".join(f"{count} {kind}" for kind, count in row["violations"].items()) or "as it should be"
        met = ", ".join(f"{count} {kind}" for kind, count in sorted(row["requests"].items()))
        print(f"{row['fault']:<22} {row['times']:>5} {times:>21} {row['longest_lie_s']:>10.1f} s  {met}; {bad}")
    for outcome in outcomes:
        counts = " ".join(f"{name}={count}" for name, count in sorted(outcome.requests.items()))
        print(
            f"{outcome.topology:<12} {len(outcome.hits)} faults, requests {counts}; stopped in {outcome.stop_s} s with"
            f" {outcome.exit_code}; the machine kept the observer waiting for {outcome.delay_s:.1f} s"
        )
        for one in outcome.memory:
            print(f"{outcome.topology:<12} memory of {one}{'' if one.is_flat else ', not flat'}")
    found = [(outcome.topology, item) for outcome in outcomes for item in outcome.violations]
    for topology, item in found[:_SHOWN]:
        print(f"VIOLATION {topology} {item.kind}: {item.text[:600]}")
    if len(found) > _SHOWN:
        print(f"and {len(found) - _SHOWN} more, in the JSON")


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault that happened: how often, its recovery, what must not have been."""
    table = []
    for kind in (*KINDS, *cluster_campaign.KINDS):
        hits = [(o, n) for o in outcomes for n, hit in enumerate(o.hits) if hit.fault.kind == kind]
        if not hits:
            continue
        recovery = sorted(s for o, n in hits if (s := o.hits[n].recovery_s) is not None)
        bad: dict[str, int] = {}
        for outcome in outcomes:
            mine = {n for o, n in hits if o is outcome}
            for item in outcome.violations:
                if mine & set(item.hits):
                    bad[item.kind] = bad.get(item.kind, 0) + 1
        table.append(
            {
                "fault": kind,
                "times": len(hits),
                "recovery_p50_s": percentile(recovery, 0.5),
                "recovery_p99_s": percentile(recovery, 0.99),
                "longest_lie_s": max(o.lies_s[n] for o, n in hits),
                "requests": dict(sum((o.hits[n].requests for o, n in hits), Counter[str]())),
                "violations": bad,
            }
        )
    return table


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "faults": rows(outcomes),
        "topologies": [
            {
                "name": outcome.topology,
                "faults": [str(hit.fault) for hit in outcome.hits],
                "requests": outcome.requests,
                "served": outcome.by_way,
                "exit_code": outcome.exit_code,
                "stop_s": outcome.stop_s,
                "observer_delay_s": round(outcome.delay_s, 1),
                "memory_mb": outcome.memory_mb,
                "memory": [dataclasses.asdict(one) for one in outcome.memory],
                "violations": [{"kind": item.kind, "text": item.text} for item in outcome.violations],
            }
            for outcome in outcomes
        ],
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="under faults, shared by the topologies")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    names, kinds = (*TOPOLOGIES, cluster_campaign.NAME), (*KINDS, *cluster_campaign.KINDS)
    parser.add_argument("--topology", type=chosen(names), default=list(TOPOLOGIES), help=f"of {','.join(names)}")
    parser.add_argument("--faults", type=chosen(kinds), default=[], help=f"of {','.join(kinds)}; default: all")
    parser.add_argument("--streams", type=int, default=2, help="of each way in")
    parser.add_argument("--keep", metavar="FOLDER", default="", help="for logs; default: a new one under /tmp")
    parser.add_argument("--plan", type=int, default=0, metavar="N", help="only print the first N faults of each")
    options = parser.parse_args(arguments)
    options.seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    return options


if __name__ == "__main__":
    sys.exit(main())
