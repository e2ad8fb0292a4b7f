"""How tests run the programs of tools/, benchmarks/ and models/: arguments for seconds, or whose test does it."""

from __future__ import annotations

RUNS: dict[str, tuple[str, ...]] = {
    "tools/chaos.py": ("--topology=mocker-1+1", "--seconds=3", "--seed=7", "--faults=clients_garbage"),
    "tools/check_recipe.py": ("recipes/mocker",),
    "tools/demo.py": ("--recipe", "recipes/mocker", "--max-tokens", "8"),
    "tools/make_api_key.py": ("alice",),
    "tools/make_api_page.py": ("--check",),
    "tools/make_dashboards.py": ("--check",),
    "tools/make_metrics_page.py": ("--check",),
    "tools/make_sample_model.py": ("--arch", "llama", "--out", "{folder}/tiny-llama"),
    "tools/serve_nodes.py": ("--dry-run", "recipes/deepseek-r1-wide-ep"),
    "tools/simulate.py": ("agentic", "--requests", "50", "--modes", "kv,random", "--plot", "{folder}/modes.png"),
    "models/train.py": ("tiny-chat", "--budget", "smoke", "--out", "{folder}/tiny-chat"),
    "benchmarks/arrivals_gpu.py": ("--shape", "tiny", "--quick"),
    "benchmarks/attention_gpu.py": ("--quick",),
    "benchmarks/batch_beside_live.py": (
        *("--engines", "mocker", "--live", "1", "--lines", "400", "--turns", "1", "--seconds", "1"),
        *("--port", "{port}"),
    ),
    "benchmarks/draws.py": ("--size", "2000"),
    "benchmarks/embedding_cache.py": ("--recipe", "recipes/tiny-vlm-agg", "--pictures", "1"),
    "benchmarks/engine_cpu.py": ("--cases", "1x8", "--steps", "2", "--threads", "1"),
    "benchmarks/engine_gpu.py": ("--shape", "tiny-experts", "--quick"),
    "benchmarks/engine_soak.py": ("--shape", "tiny", "--quick", "--requests", "50"),
    "benchmarks/engine_restart.py": ("--shape", "tiny", "--kills", "1", "--modes", "mapped"),
    "benchmarks/kv_tiers.py": ("--shape", "tiny", "--quick", "--threads", "1"),
    "benchmarks/seeded_streams.py": (
        *("models/tiny-chat", "--dtype", "float32", "--streams", "4", "--tokens", "6", "--batch", "2"),
    ),
    "benchmarks/transfer.py": ("--quick",),
    "benchmarks/transfer_gpu.py": ("--quick", "--engine", "none"),
    "benchmarks/fabric_gpu.py": ("--quick", "--engine", "none"),
    "benchmarks/frontend.py": (
        *("--contenders", "bireme", "--modes", "fast", "--streams", "2", "--repeat", "1"),
        *("--seconds", "1", "--warmup-s", "0.5", "--port", "{port}"),
    ),
    "benchmarks/router.py": (
        *("--contenders", "bireme", "--sizes", "2000", "--workers", "10", "--repeat", "1", "--matches", "10"),
    ),
    "benchmarks/routing_grid.py": (
        *("--loads", "0.3", "--sharings", "0.5", "--caches", "1.2", "--rounds", "2", "--plot", "{folder}/grid.png"),
    ),
    "benchmarks/routing.py": (
        *("--servers", "1", "--prefixes", "1", "--turns", "2", "--prefix-tokens", "64", "--question-tokens", "8"),
        *("--answer-tokens", "2", "--rounds", "1", "--herd", "4", "--step-ms", "1"),
    ),
    "benchmarks/step_records.py": ("--quick",),
    "benchmarks/short_prompts.py": ("--requests", "5", "--starts", "1"),
    "benchmarks/structural_tags.py": (
        *("--requests", "3", "--guides", "1", "--vocab", "2000", "--steps", "2", "--port", "{port}"),
    ),
    "benchmarks/disaggregation_gpu.py": ("--quick",),
    "benchmarks/serving_gpu.py": ("--shape", "tiny", "--quick", "--rounds", "1"),
    "benchmarks/serving_overhead.py": (
        *("--streams", "2", "--step-ms", "1", "--seconds", "0.5", "--warmup-s", "0.2"),
        *("--prompt-tokens", "8", "--max-tokens", "8"),
    ),
}
ELSEWHERE = {  # program -> the test that runs it
    "benchmarks/instructions.py": "tests/server/test_instructions.py",
    "tools/audit.py": "tests/tools/test_audit.py",
    "tools/check_fabric.py": "tests/tools/test_check_fabric.py",
    "tools/clients.py": "tests/tools/test_client_environments.py",
    "tools/describe_trtllm.py": "tests/tools/test_describe_trtllm.py",
    "tools/drain.py": "tests/launch/test_drain.py",
    "tools/make_recipe.py": "tests/tools/test_make_recipe.py",
    "tools/make_sbatch.py": "tests/tools/test_make_sbatch.py",
    "tools/make_manifests.py": "tests/services/test_manifests.py",
    "tools/make_parser_table.py": "tests/text/parsers/test_published_templates.py",
    "tools/perf_analyzer.py": "tests/server/test_perf_analyzer.py",
    "tools/real_model.py": "tests/real/test_smollm2.py",
    "tools/record_steps.py": "tests/tools/test_record_steps.py",
    "tools/screenshots.py": "tests/services/test_screenshots.py",
    "tools/serve.py": "tests/server/test_served_recipes.py",
    "tools/show_config.py": "tests/server/test_tensorrtllm_backend_clients.py",
    "tools/sleep.py": "tests/launch/test_sleep.py",
    "tools/status.py": "tests/launch/test_admin_door.py",
    "tools/soak.py": "tests/server/test_soak.py",
    "tools/sweep.py": "tests/tools/test_sweep.py",
    "tools/update.py": "tests/server/generations/rolling_turns.py",
}
