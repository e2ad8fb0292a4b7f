#!/bin/sh
# The torch engine, KV transfer and pictures' embeddings on this machine's GPU: equality first, then speed. Nothing has to be built:
# Triton compiles the kernels when they are first used. Needs pytest, pytest-asyncio and hypothesis beside the engine's packages.
#
#   sh tests/gpu/run.sh                          # figures as JSON in out/engine_gpu.json
#   sh tests/gpu/run.sh /tmp/figures.json --shape 1b --batch 1 8
#
# The first argument is a file or a folder that is there; all others are options of benchmarks/engine_gpu.py.
# BIREME_PYTHON names the Python. Fails where a test does.
set -eu
cd "$(dirname "$0")/../.."
python=${BIREME_PYTHON:-python3}
output=out/engine_gpu.json
case ${1:--} in
    -*) ;;
    *) output=$1 && shift ;;
esac
[ ! -d "$output" ] || output=${output%/}/engine_gpu.json
mkdir -p "$(dirname "$output")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    echo "run.sh: $python has no torch that sees a GPU; name another in BIREME_PYTHON" >&2
    exit 2
fi
workers=$("$python" -c 'import importlib.util, os; print(min(12, os.cpu_count()) if importlib.util.find_spec("xdist") else "")')
"$python" -m pytest -q ${workers:+-n "$workers"} -p no:cacheprovider tests/engines/torch tests/kv/transfer --ignore tests/engines/torch/test_pictures.py \
    --ignore tests/engines/torch/test_video_pipelines.py
"$python" tests/gpu/embedding_pool.py
"$python" tests/gpu/mixed_stress.py
"$python" tests/gpu/mixed_stress.py --drafts 4
if ! "$python" benchmarks/engine_gpu.py "$@" >"$output.txt"; then
    cat "$output.txt"
    echo "run.sh: benchmarks/engine_gpu.py has failed" >&2
    exit 1
fi
cat "$output.txt"
grep '^{' "$output.txt" >"$output"
rm "$output.txt"
echo "figures: $output"
