#!/bin/sh
# Install bireme into the environment of a Python that has tensorrt_llm, and replace nothing that is there.
#
#   sh docker/into_environment.sh            the first python3 on PATH
#   sh docker/into_environment.sh PYTHON
#   sh docker/into_environment.sh PYTHON engine    for engine processes alone: stubs and frontend have another Python
#
# NVIDIA's Triton images keep torch, tensorrt_llm and all else in /opt/venv-tritonserver (from 26.03 on), its release
# images in the system's Python. There is no environment of bireme's own beside it: one made from a virtual environment
# sees the packages of the Python below, none of that environment's. tensorrt_llm is built against these very versions
# of torch and its companions, so what is installed constrains pip, which then fails instead of replacing anything. An
# image's own constraints (PIP_CONSTRAINT) don't count beside it: they are older than what was installed last.
# Without the extras `server` and `torch`: the engine is TensorRT-LLM. av encodes what VisualGen makes; the rest of the
# extra `video` is diffusers.
set -eu
export PIP_CONSTRAINT=
export PIP_BREAK_SYSTEM_PACKAGES=1  # Debian's Python asks for it: what is Debian's is among what is not replaced

python=$(command -v "${1:-python3}") || {
    echo "into_environment: ${1:-python3}: no such program; name the python that has tensorrt_llm" >&2
    exit 2
}
case $python in /*) ;; *) python=$PWD/$python ;; esac
case ${2:-all} in
all) extras=openai,kv,etcd,nats,multimodal ;;
engine) extras=kv,etcd,nats,multimodal ;;
*)
    echo "into_environment: $2: leave it out, or say engine" >&2
    exit 2
    ;;
esac
checkout=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() { echo "into_environment: $*" >&2; exit 1; }
versions() { "$python" -m pip list --format=freeze | grep -E '^[A-Za-z0-9._-]+==[^ ]+$' | grep -v '^bireme==' | sort; }
# Looked for and not imported: where an image is built there is no GPU, nor its driver's library.
package() {
    (cd / && "$python" - <<'PY'
import importlib.metadata
import importlib.util

spec = importlib.util.find_spec("tensorrt_llm")
print(importlib.metadata.version("tensorrt_llm"), spec.origin) if spec else exit("no tensorrt_llm")
PY
    )
}

found=$(package) || fail "$python has no tensorrt_llm; name the python that has it (docs/trtllm.md names the images)"
case $found in
0.* | 1.0.* | 1.1.*) fail "tensorrt_llm ${found%% *} is not driven; 1.2 is the oldest (docs/trtllm.md names the images)" ;;
esac

versions >"$scratch/before"
# UCX reads a GPU's memory with the CUDA that it was built for. torch is not imported for it, either.
cuda() {
    (cd / && "$python" - 2>/dev/null <<'PY'
import importlib.util
import runpy

print(runpy.run_path(importlib.util.find_spec("torch").submodule_search_locations[0] + "/version.py")["cuda"])
PY
    )
}
case $(cuda || true) in
13.*) nixl="nixl-cu13" ;;
*) nixl="nixl" ;;
esac
"$python" -m pip install --constraint "$scratch/before" --editable "${checkout}[$extras,$nixl]" "av>=15,<19"
versions >"$scratch/after"

replaced=$(comm -23 "$scratch/before" "$scratch/after" | tr '\n' ' ')
[ -z "$replaced" ] || fail "pip has replaced $replaced"
[ "$(package)" = "$found" ] || fail "tensorrt_llm was $found, and is $(package)"
echo "into_environment: tensorrt_llm $found"
