"""What an engine takes of memory against what was said before its start, of ten configurations of random weights.

Each configuration is one process. It notes its memory when all libraries are loaded, loads the engine, and fills the
KV pool with prompts and tokens. Taken is the most that it has held since it was ready: on a CPU the kernel's peak of
resident pages, less what was noted; on a GPU what torch has allocated of it. A first process with a model of next to
nothing says what an engine takes whatever its model (compiled code, threads' buffers); both figures have that part.

    python benchmarks/memory_estimate.py                  # on a GPU, where there is one
    python benchmarks/memory_estimate.py --device cpu --cases llama,gpt-oss
    python benchmarks/memory_estimate.py --quick

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import chosen
from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.stub.environment import child_environment

AIM = 0.05
_SMALL = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
          "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
          "tie_word_embeddings": False, "dtype": "bfloat16"}  # fmt: skip
_FULL_EVERY_2 = ["sliding_attention", "full_attention"] * 6
_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
_LOCAL_ROPE = {"full_attention": _ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-float32": {"model_type": "llama", "dtype": "float32", "num_hidden_layers": 8},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 128_256},
    "qwen2": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
              "intermediate_size": 4864, "num_hidden_layers": 20},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 512, "rope_parameters": _LOCAL_ROPE, "head_dim": 128,
               "query_pre_attn_scalar": 128, "layer_types": _FULL_EVERY_2},
    "qwen3-moe": {"model_type": "qwen3_moe", **_MOE},
    "gpt-oss": {"model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
                "intermediate_size": 1024, "layer_types": _FULL_EVERY_2},
    "deepseek-v3": {"model_type": "deepseek_v3", "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1,
                    "topk_group": 1, "moe_intermediate_size": 384, "first_k_dense_replace": 1, "n_shared_experts": 1,
                    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
                    "v_head_dim": 64, "num_key_value_heads": 16, "head_dim": None},
    "olmo2": {"model_type": "olmo2", "head_dim": None},
}  # fmt: skip
_FEW_LAYERS = {"num_hidden_layers": 2, "layer_types": None}
_NOTHING = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
ENGINE = EngineConfig(
    load_format="dummy",
    max_batch_size=8,
    max_num_tokens=512,
    kv_cache_config=KvCacheConfig(max_tokens=6144, tokens_per_block=32),
)


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measure(Path(options.child))))
        return
    rest = run("nothing", _NOTHING, options)
    base = rest["taken"] - rest["told"]
    rows = []
    for name in options.cases:
        row = run(name, CASES[name], options)
        row["told"] += base
        row["off"] = round(row["told"] / row["taken"] - 1, 4)
        rows.append(row)
        print(line_of(row), flush=True)
    report(rows, base, rest)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=chosen(tuple(CASES)), default=list(CASES), help="names, separated by commas")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--quick", action="store_true", help="two layers, to see that it runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(name: str, changes: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        write_config(Path(folder), changes | (_FEW_LAYERS if options.quick else {}))
        environment = child_environment(2) | ({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {})
        done = subprocess.run(
            [sys.executable, __file__, "--child", folder], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return {"case": name} | json.loads(done.stdout.splitlines()[-1])


def write_config(folder: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    tree = {key: value for key, value in (_SMALL | changes).items() if value is not None}
    kind = tree.pop("model_type")
    config = AutoConfig.for_model(kind, **tree, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]])
    config.save_pretrained(folder)


def measure(folder: Path) -> dict[str, Any]:
    import torch

    from bireme.engines.base import EngineContext
    from bireme.engines.child.validate import Gate
    from bireme.engines.torch import prepare
    from bireme.engines.torch.loading import LoadedEngine
    from bireme.launch.footprint.config_fields import read_config
    from bireme.launch.footprint.decoder_shape import read_shape
    from bireme.launch.footprint.engine_footprint import EngineSizes, Surroundings
    from bireme.messages import EngineRequest, SamplingParams
    from bireme.metrics import Registry
    from bireme.own_process import freeze_gc, give_back_memory, reuse_memory

    config = ENGINE
    has_gpu = torch.cuda.is_available()
    around = Surroundings(gpu_bytes=torch.cuda.mem_get_info()[1] if has_gpu else 0)
    began = time.perf_counter()
    told = EngineSizes(config, read_shape(read_config(folder)), None).footprint(around)
    told_s = time.perf_counter() - began
    prepare(str(folder), config)
    before = resident()
    loaded = LoadedEngine(
        EngineContext("decode", "decode", str(folder), config, Registry("decode"), num_threads=2), print
    )
    freeze_gc()  # these three as the engine's process does
    give_back_memory()
    reuse_memory()
    after_load = resident()
    forget_peak()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    gate, core = Gate("decode", loaded.capacity, Limits(), b""), loaded.core
    with torch.inference_mode():
        for number in range(ENGINE.max_batch_size + 1):
            count = min(told.limits.max_seq_len - 40, ENGINE.kv_cache_config.max_tokens // ENGINE.max_batch_size - 40)
            if number == 0:
                count = told.limits.max_seq_len - 40
            prompt = [(number * 977 + at * 31) % told_vocab(folder) for at in range(count)]
            request = EngineRequest(
                prompt=b"".join(token.to_bytes(4, "little") for token in prompt),
                sampling=SamplingParams(max_tokens=8, ignore_eos=True),
            )
            core.requests.add(loaded.admission.admit((0, number + 1), gate.admit(request)))
        while core.num_running or core.num_waiting:
            core.step()
            core.take_outputs()
    if has_gpu:
        taken = torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        more = {"reserved": torch.cuda.memory_reserved(), "device": total - free}
    else:
        taken, more = peak() - before, {"before": before, "after_load": after_load - before, "now": resident() - before}
    parts = {"weights": told.weights, "pool": told.pool, "step": told.step}
    return {
        "told": told.total,
        "taken": taken,
        **parts,
        "told_ms": round(1e3 * told_s, 1),
        "paths": loaded.capacity.step_paths,
        **more,
    }


def told_vocab(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def resident() -> int:
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def line_of(row: dict[str, Any]) -> str:
    mib = " ".join(f"{name}={value >> 20}" for name, value in row.items() if isinstance(value, int))
    return f"{row['case']:14} off={row['off']:+.1%} {mib} told_ms={row['told_ms']} paths={','.join(row['paths'])}"


def report(rows: list[dict[str, Any]], base: int, rest: dict[str, Any]) -> None:
    print(f"rest={base >> 20} MiB")
    print(json.dumps({"benchmark": "memory_estimate", "rows": rows, "rest": rest}))
    for row in rows:
        word = "ok" if abs(row["off"]) <= AIM else "BELOW"
        print(f"aim: {row['case']}, estimate over what is taken {row['off']:+.1%}, within {AIM:.0%} asked for: {word}")


if __name__ == "__main__":
    main()
