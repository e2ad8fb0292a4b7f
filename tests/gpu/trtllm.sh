#!/bin/sh
# What works here with the real TensorRT-LLM: its contract, and every recipe that fits the GPUs. Prints a verdict table.
#
#   docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 -v bireme-models:/models \
#     --entrypoint sh bireme-trtllm tests/gpu/trtllm.sh
#   sh tests/gpu/trtllm.sh recipes/qwen3 --model qwen3=/models/Qwen3-0.6B
#   sh tests/gpu/trtllm.sh --help
#
# In the images of docker/Dockerfile.trtllm and Dockerfile.trtllm-release, or by hand where into_environment.sh has been.
set -eu
cd "$(dirname "$0")/../.."

for python in "${BIREME_PYTHON:-}" /opt/triton/bin/python python3; do
    [ -n "$python" ] || continue
    if "$python" -c 'import msgspec, numpy, yaml, zmq' 2>/dev/null; then
        exec "$python" tests/gpu/trtllm_verdict.py "$@"
    fi
done
echo "trtllm.sh: no python here has bireme's requirements; run: sh docker/into_environment.sh" >&2
exit 2
