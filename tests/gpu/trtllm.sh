#!/bin/sh
# What works here with the real TensorRT-LLM: a row a feature, on a model that is made for it. Needs no download, no
# pytest and no checkout that can be written. Progress comes on stderr, a JSON report for a bug report on stdout.
#
#   docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 \
#     --entrypoint sh bireme-trtllm tests/gpu/trtllm.sh > trtllm.json
#   sh tests/gpu/trtllm.sh --folder DIR      keeps the model and the logs; --start-timeout S, --row-timeout S
#   sh tests/gpu/trtllm.sh recipes recipes/qwen3 --model qwen3=/models/Qwen3-0.6B     serves recipes instead
#
# In the images of docker/Dockerfile.trtllm and Dockerfile.trtllm-release, or by hand where into_environment.sh has been.
# docs/trtllm.md says what the rows are. Exit codes: 0 nothing failed; 1 something did; 2 there is nothing to try.
set -eu
help() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

checkout=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1

requirements='import msgspec, numpy, yaml, zmq'
if [ "${1:-}" = recipes ]; then
    shift
    program=tests.gpu.trtllm_recipes
    set -- "${BIREME_PYTHON:-}" /opt/triton/bin/python python3 -- "$@"
else
    program=tests.gpu.trtllm_proof
    requirements="$requirements; from importlib.util import find_spec; assert find_spec('tensorrt_llm')"
    set -- "${BIREME_ENGINE_PYTHON:-}" python3 /opt/venv-tritonserver/bin/python3 /opt/triton/bin/python -- "$@"
fi
found=
while [ "$1" != -- ]; do
    if [ -z "$found" ] && [ -n "$1" ] && "$1" -c "$requirements" 2>/dev/null; then
        found=$1
    fi
    shift
done
shift
[ -n "$found" ] || {
    case " $* " in *" --help "* | *" -h "*) help && exit 0 ;; esac
    echo "trtllm.sh: no python here has tensorrt_llm and bireme's requirements; run: sh docker/into_environment.sh" >&2
    exit 2
}
exec "$found" -P -m "$program" "$@"
