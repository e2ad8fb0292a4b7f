#!/bin/sh
# Make the Python environment: .venv with tritonserver, torch and this package. Quick when nothing has changed.
#
#   sh tools/setup.sh                       PYTHON=python3.11 VENV=.venv sh tools/setup.sh
#
# Each step leaves a stamp in the environment; the package's stamp carries pyproject.toml's checksum.
# torch comes first and alone: on a machine without a GPU the resolver would otherwise take the build with
# CUDA and gigabytes of libraries. Its version is the one that the exactness tests were made with.
set -eu

TORCH=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=${VENV:-.venv}
NEEDED_MB=3000
cd "$(dirname "$0")/.."

say() { printf '%s setup  | %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { printf '\nsetup: %s\n' "$*" >&2; exit 2; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

is_supported() {
    case "$(version_of "$1")" in 3.11 | 3.12) return 0 ;; *) return 1 ;; esac
}

# The first that was built with optimizations and lacks nothing; of others, the first that fits.
choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
        is_supported "$PYTHON" || fail "$PYTHON is not a Python that fits (version: $(version_of "$PYTHON" | grep . || echo none)); 3.11 or 3.12 is needed"
        return
    fi
    first=
    for PYTHON in python3 python3.12 python3.11 /usr/bin/python3; do
        if ! command -v "$PYTHON" >/dev/null || ! is_supported "$PYTHON"; then continue; fi
        first=${first:-$PYTHON}
        if is_optimized "$PYTHON" && is_complete "$PYTHON"; then break; fi
        PYTHON=
    done
    PYTHON=${PYTHON:-$first}
    [ -n "$PYTHON" ] ||
        fail "no Python 3.11 or 3.12 (python3 is $(version_of python3)); install one (apt-get install python3.11)" \
            "or name it: make PYTHON=/path/to/python3.11"
    [ "$PYTHON" = "$first" ] || is_optimized "$first" ||
        say "$first was built without optimizations, with which Python's share of each request takes about 15% less:" \
            "taking $PYTHON (make PYTHON=$first setup takes it all the same)"
}

# With --enable-optimizations, as distributions, conda, uv and Docker's images have it; pyenv does not unless it is told.
is_optimized() {
    "$1" -c 'import sys, sysconfig
how = sysconfig.get_config_var("CONFIG_ARGS") or ""
sys.exit(sys.base_prefix != "/usr" and "--enable-optimizations" not in how)'
}

# With the headers, for which Triton's kernels ask where there is a GPU.
is_complete() {
    has_venv "$1" && has_libpython "$1" && "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

# An installed tritonserver (an NGC image, for instance) brings its own Python stub.
has_own_tritonserver() {
    [ -n "${BIREME_TRITONSERVER:-}" ] || command -v tritonserver >/dev/null || [ -x /opt/tritonserver/bin/tritonserver ]
}

check_machine() {
    [ "$(uname -s)" = Linux ] || fail "tritonserver runs on Linux, not on $(uname -s); use docker/Dockerfile"
    has_venv "$PYTHON" || fail "$PYTHON has no venv module; run: apt-get install python3-venv python$(version_of "$PYTHON")-venv"
    free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$NEEDED_MB" ] ||
        fail "the disk is full: $free_mb MB are free here, about $NEEDED_MB MB are needed; free some space"
    has_libpython "$PYTHON" || fail "libpython$(version_of "$PYTHON").so.1.0 is missing, which tritonserver's Python" \
        "stub needs; run: apt-get install libpython$(version_of "$PYTHON")"
}

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

has_libpython() {
    if has_own_tritonserver; then return; fi
    "$1" - <<'PY'
import os, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
multiarch = sysconfig.get_config_var("MULTIARCH") or ""
configured = sysconfig.get_config_var("LIBDIR") or ""
folders = [configured, os.path.join(configured, multiarch), os.path.join(sys.base_prefix, "lib"),
           os.path.join("/usr/lib", multiarch), "/usr/lib64", "/usr/lib"]
sys.exit(not any(os.path.isfile(os.path.join(folder, name)) for folder in folders))
PY
}

pip_install() {
    if [ -t 1 ]; then quiet=; else quiet=--quiet; fi
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile $quiet "$@"
}

# What servers and engines import is compiled now, once, and not by each of the processes of a first launch. All that was
# installed would take five times as long.
compile_imports() {
    PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -c \
        'import bireme.engines.torch.engine, bireme.openai.app, transformers.models.llama.modeling_llama' ||
        fail "what servers and engines import can't be imported; its error stands above"
}

is_made() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

make_venv() {
    say "making $VENV with $PYTHON ($(version_of "$PYTHON"))"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON -m venv failed; run: apt-get install python3-venv"
    pip_install --upgrade pip || true  # before 24 choosing versions takes twice as long; without a network what is there does
}

has_torch() { "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; }

install_torch() {
    if has_torch; then return; fi
    say "[1/2] torch $TORCH (about 200 MB without a GPU, 3 GB with one)"
    if [ "$(uname -m)" = x86_64 ] && ! command -v nvidia-smi >/dev/null && [ ! -e /dev/nvidiactl ]; then
        pip_install "torch==$TORCH+cpu" 2>/dev/null && return
        pip_install --retries 1 --timeout 20 --extra-index-url "$CPU_INDEX" "torch==$TORCH+cpu" 2>/dev/null && return
        say "no CPU build of torch $TORCH within reach; taking the usual one"
    fi
    pip_install "torch==$TORCH" || fail "pip could not install torch $TORCH; its message stands above"
}

install_package() {
    extras="server,torch,openai,dev"
    if has_own_tritonserver; then extras="torch,openai,dev"; fi
    stamp="$VENV/.stamp-$(printf '%s' "$extras" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
    if [ -e "$stamp" ]; then return; fi
    say "[2/2] bireme with [$extras] (about 150 MB)"
    pip_install -e ".[$extras]" || fail "pip could not install the package; its message stands above"
    compile_imports
    # Compiled now and kept beside the source: the first server that routes by KV does not wait for it.
    "$VENV/bin/python" -m bireme.kv.compile || fail "the compiled functions of bireme/kv can't be made"
    rm -f "$VENV"/.stamp-*
    : >"$stamp"
}

install_hooks() {
    # A checkout's own setting stays; without git there is nothing to look at.
    { [ -e .git ] && ! git config core.hooksPath >/dev/null; } 2>/dev/null || return 0
    git config core.hooksPath tools/hooks 2>/dev/null || true
}

began=$(date +%s)
if ! is_made; then
    choose_python
    check_machine
    make_venv
elif [ -n "${PYTHON:-}" ]; then
    choose_python
    [ "$(version_of "$VENV/bin/python")" = "$(version_of "$PYTHON")" ] ||
        fail "$VENV has Python $(version_of "$VENV/bin/python"), PYTHON is $(version_of "$PYTHON"); run: make clean-venv"
fi
install_torch
install_package
install_hooks
took=$(($(date +%s) - began))
[ "$took" -lt 3 ] || say "ready in $took s: $VENV"
