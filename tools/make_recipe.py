"""Make a recipe for a model, GPUs and a load: which engines, how many, how large; reasons stand in its YAML.

    python tools/make_recipe.py --model models/tiny-chat --engine torch --gpu h100 --gpus 1 \\
        --isl 512 --osl 128 --concurrency 32 --out /tmp/tiny
    python tools/make_recipe.py --model nvidia/DeepSeek-R1-FP4 --config config.json --gpu gb200 --gpus 64 --nodes 16 \\
        --isl 8150 --osl 1024 --concurrency 4096 --out recipes/r1-64
    python tools/make_recipe.py --model FOLDER --gpu h200 --gpus 8 --isl 4000 --osl 500 --ttft-ms 1000 --itl-ms 25 \\
        --timings aiconfigurator --timings-python .clients/aiconfigurator/bin/python --out recipes/mine

The model's config.json says what it weighs and keeps for a token (hf_quant_config.json beside it, where there is one);
nothing is fetched. Times are estimated from the GPU's peaks. Better ones: a table of measured step times of this model
on one such GPU, or AIConfigurator's tables, which need a Python of their own (docs/sizing.md, "Recipes"). What does not
fit is refused with what to change. The recipe is checked as by tools/check_recipe.py before it is written, and
tools/make_manifests.py and tools/make_sbatch.py deploy it.

With --json the last line is one JSON document: counts, sizes, and what to expect.

Exit codes: 0 written; 1 the recipe has an error, a fault of this program; 2 there can be none, or an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.errors import ConfigError
from bireme.launch.recipe_check import check_folder
from bireme.sizing.aiconfigurator import TableTimings
from bireme.sizing.machines import GPUS
from bireme.sizing.model_shapes import read_shape
from bireme.sizing.recipe_folder import MADE, recipe_files
from bireme.sizing.recipe_plan import RecipePlan, Wish, check_wish, plan
from bireme.sizing.recipe_rules import Lengths
from bireme.sizing.step_times import StepTimes
from bireme.sizing.timings import MeasuredTimings, PeakTimings, Timings

GOOD, BAD, WRONG = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "tools/make_recipe.py", *given])
    out = Path(options.out)
    try:
        check_out(out, options.force)
        wish = wish_of(options)
        with timings_of(options, wish) as timings:
            found = plan(wish, timings)
            files = recipe_files(wish, found, timings, command)
        findings = write_checked(files, out)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return WRONG
    except OSError as error:
        print(f"--out {out}: can't be written ({error})", file=sys.stderr)
        return WRONG
    for line in findings:
        print(line)
    if any(": error: " in line for line in findings):
        print("nothing is written: please report it with the command", file=sys.stderr)
        return BAD
    print((out / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# "))
    print(
        f"{found.requests_per_s:.2f} requests/s, TTFT {found.ttft_ms:.0f} ms, {found.itl_ms:.1f} ms a token,", end=" "
    )
    print(timings.source)
    print(f"{out}: python tools/check_recipe.py {out}")
    if options.json:
        print(json.dumps(summary(found, timings)))
    return GOOD


def check_out(out: Path, may_replace: bool) -> None:
    """Raises ConfigError."""
    if out.exists() and not (may_replace and (out / "recipe.yaml").is_file()):
        hint = "name another folder" if may_replace else "name another folder, or give --force to replace a recipe"
        raise ConfigError(f"--out {out}: it is there already; {hint}")


def wish_of(options: argparse.Namespace) -> Wish:
    """Raises ConfigError."""
    if 0 < options.max_prompt < options.isl:
        raise ConfigError(f"--max-prompt {options.max_prompt}: less than --isl {options.isl}, which is of a usual one")
    if options.gpus % options.nodes:
        raise ConfigError(f"--gpus {options.gpus}: they don't spread evenly over --nodes {options.nodes}")
    wish = Wish(
        shape=read_shape(options.model, options.config),
        gpu=GPUS[options.gpu],
        nodes=options.nodes,
        gpus_per_node=options.gpus // options.nodes,
        lengths=Lengths(prompt=options.isl, output=options.osl, most=options.max_prompt),
        ttft_ms=options.ttft_ms,
        itl_ms=options.itl_ms,
        concurrency=options.concurrency,
        engine=options.engine,
        mode=options.mode,
        drafts={"off": 0, "auto": None}.get(options.mtp, 0) if not options.mtp.isdigit() else int(options.mtp),
        prefill_ranks=options.prefill_ranks,
        decode_ranks=options.decode_ranks,
        prefill_workers=options.prefill_workers,
        decode_workers=options.decode_workers,
        attention_dp={"auto": None, "on": True, "off": False}[options.attention_dp],
    )
    check_wish(wish)
    return wish


def timings_of(options: argparse.Namespace, wish: Wish) -> AbstractContextManager[Timings]:
    """Raises ConfigError."""
    if options.timings_python and options.timings != "aiconfigurator":
        raise ConfigError(f"--timings-python {options.timings_python}: say --timings aiconfigurator, or leave it out")
    if options.timings == "peaks":
        return nullcontext(PeakTimings(wish.shape, wish.gpu, wish.value_bytes))
    if options.timings == "aiconfigurator":
        return TableTimings(wish, options.timings_python, options.config)
    return nullcontext(MeasuredTimings(StepTimes.read(options.timings)))


def write_checked(files: dict[str, str], out: Path) -> list[str]:
    """Write the recipe if it has no error; return what a check of it finds."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, out.name)
        folder.mkdir()
        for name, text in files.items():
            text = text.replace("{folder}", str(out)).replace("{name}", out.name) if name == "README.md" else text
            (folder / name).write_text(text, encoding="utf-8")
        findings = check_folder(folder)
        if not any(finding.severity == "error" for finding in findings):
            for old in MADE:
                (out / old).unlink(missing_ok=True)
            shutil.copytree(folder, out, dirs_exist_ok=True)
        return [str(finding).replace(str(folder), str(out)) for finding in findings]


def summary(found: RecipePlan, timings: Timings) -> dict[str, Any]:
    stages = {"decode": (found.decode, found.num_decode)}
    if found.prefill is not None:
        stages["prefill"] = (found.prefill, found.num_prefill)
    return {
        "servers": found.servers,
        "gpus": found.num_gpus,
        "workers": {
            stage: {"layout": engine.layout.name, "count": count, "max_batch_size": engine.rows}
            for stage, (engine, count) in stages.items()
        },
        "requests_per_s": round(found.requests_per_s, 3),
        "ttft_ms": round(found.ttft_ms, 1),
        "itl_ms": round(found.itl_ms, 2),
        "timings": timings.source,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER_OR_HUB_ID")
    add("--config", type=Path, metavar="FILE", help="config.json of a hub id; default: that of the folder")
    add("--gpu", required=True, choices=sorted(GPUS))
    add("--gpus", required=True, type=_positive, metavar="N", help="of all nodes together")
    add("--nodes", type=_positive, default=1, metavar="N")
    add("--isl", required=True, type=_positive, metavar="TOKENS", help="of a usual prompt")
    add("--max-prompt", type=_positive, default=0, metavar="TOKENS", help="of the longest one; default: 203 more")
    add("--osl", required=True, type=_positive, metavar="TOKENS", help="of an answer")
    add("--concurrency", type=_positive, default=0, metavar="N", help="requests under way at once")
    add("--ttft-ms", type=_duration, default=math.inf, metavar="MS", help="target of the first token, without a queue")
    add("--itl-ms", type=_duration, default=math.inf, metavar="MS", help="target of the mean time between tokens")
    add("--engine", choices=("trtllm", "torch"), default="trtllm")
    add("--mode", choices=("auto", "aggregated", "disaggregated"), default="auto", help="auto: what serves more")
    add("--mtp", choices=("off", "auto", "1", "2", "3"), default="off", help="tokens drafted by the model's own layers")
    add("--attention-dp", choices=("auto", "on", "off"), default="auto", help="of workers that decode: DEP or TEP")
    add("--prefill-ranks", type=_positive, default=0, metavar="N", help="GPUs of each; default: what serves most")
    add("--decode-ranks", type=_positive, default=0, metavar="N")
    add("--prefill-workers", type=_positive, default=0, metavar="N")
    add("--decode-workers", type=_positive, default=0, metavar="N", help="with --mode aggregated: of all workers")
    add(
        "--timings",
        default="peaks",
        metavar="SOURCE",
        help="peaks, aiconfigurator, or a table of step times: its name or file",
    )
    add("--timings-python", default="", metavar="FILE", help="Python that has aiconfigurator-core")
    add("--out", required=True, metavar="FOLDER")
    add("--force", action="store_true", help="replace the folder")
    add("--json", action="store_true", help="end with one JSON document")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}; 1 or more")
    return number


def _duration(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; more than 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
