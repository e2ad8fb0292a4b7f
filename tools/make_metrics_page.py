"""Write docs/metrics.md from the table of metrics.

    python tools/make_metrics_page.py             write it
    python tools/make_metrics_page.py --check     exit with 1 when the file is not what would be written

A part of the page takes the metrics whose names begin as it says and that no part before it has taken. A metric that no
part takes fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.metric_aliases import OF_FRONTENDS, OF_WORKERS, Alias
from bireme.metrics import TABLE, MetricSpec

PAGE = CHECKOUT / "docs" / "metrics.md"
HEAD = """\
# Metrics

Every metric of bireme, written by `tools/make_metrics_page.py` from the table in `bireme/metrics.py`. Stubs and \
engines publish on Triton's `/metrics` (port 8002), the frontend on its own port; `docker/` has Grafana dashboards \
and alerts over them: [observability.md](observability.md#alerts-and-dashboards). What to watch while \
tuning: [tuning.md](tuning.md).

The label `worker` is the Triton model's name (`decode`, `decode_1`, `generate`), of the frontend `frontend`, of the \
planner `planner`. A histogram is published as the series `_bucket`, `_sum` and `_count`; `histogram_quantile` works \
on them, though Triton's page calls their type counter.
"""
PARTS: dict[str, tuple[str, ...]] = {
    "Routing, [routing.md](routing.md)": ("bireme_rout", "bireme_prompts_placed_"),
    "KV events and load, [kv_events.md](kv_events.md)": ("bireme_kv_event", "bireme_kv_publisher_", "bireme_kv_feed_"),
    "KV transfer, [kv_transfer.md](kv_transfer.md)": ("bireme_kv_transfer_", "bireme_kv_leases"),
    "KV blocks and their tiers, [kv_tiers.md](kv_tiers.md)": ("bireme_kv_", "bireme_preemptions_"),
    "Engines, [engine_process.md](engine_process.md)": ("bireme_engine_",),
    "Pictures, [multimodal.md](multimodal.md)": ("bireme_embedding_", "bireme_image"),
    "Videos, [video.md](video.md)": ("bireme_video_",),
    "Frontend, [openai.md](openai.md)": (
        *("bireme_frontend_", "bireme_http_", "bireme_rate_limited_", "bireme_batch_"),
        *("bireme_key_", "bireme_model_", "bireme_answered_"),
    ),
    "Planner, [sizing.md](sizing.md#the-planner-at-work)": ("bireme_planner_",),
    "Requests and tokens": ("bireme_",),
    "TensorRT-LLM's own, [trtllm.md](trtllm.md)": ("trtllm_",),
}
OTHER_NAMES = """\
## Other names, [gateways.md](gateways.md)

With `metrics.aliases` in recipe.yaml the pages have these, too: the same counts under the names of others. Workers' \
are on Triton's page, the frontend's on its own. Labels are those that a name has beside the set's: `model` and \
`version`; `model_name` and `engine`; `model`, `worker_id`, `dynamo_namespace`, `dynamo_component` and \
`dynamo_endpoint`; of the frontend `model`.

| set | name | type | labels | made of |
|---|---|---|---|---|
"""


def text() -> str:
    """Return the page. Raises ValueError for a metric that no part takes."""
    left = dict(TABLE)
    pieces = [HEAD]
    for title, beginnings in PARTS.items():
        taken = [left.pop(name) for name in list(left) if name.startswith(beginnings)]
        rows = "\n".join(row_of(spec) for spec in taken)
        pieces.append(f"## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n{rows}\n")
    if left:
        raise ValueError(f"no part of the page takes {', '.join(left)}; see PARTS")
    names = [f"| {name} | {alias_row(one)} |\n" for name, own in OF_WORKERS.items() for one in own]
    names += [f"| {name}, frontend | {alias_row(one)} |\n" for name, own in OF_FRONTENDS.items() for one in own]
    return "\n".join([*pieces, OTHER_NAMES + "".join(names)])


def alias_row(alias: Alias) -> str:
    fixed = [f'{label}="{value}"' for label, value in alias.fixed.items()]
    labels = ", ".join([*fixed, *filter(None, (alias.renamed,)), *alias.told])
    only = f" of {alias.only[0]}" if alias.only else ""
    return f"`{alias.name}` | {alias.kind} | {labels} | {alias.made_of}{only}"


def row_of(spec: MetricSpec) -> str:
    bounds = f" Buckets from {spec.buckets[0]:g} to {spec.buckets[-1]:g}." if spec.buckets else ""
    return f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels)} | {spec.help}{bounds} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text() == text() else 1
    PAGE.write_text(text())
    print(f"wrote {PAGE.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
