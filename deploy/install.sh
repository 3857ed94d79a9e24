#!/usr/bin/env bash
# Set up a virtual environment with Headway in it. Idempotent: a second run takes a second.
# usage: deploy/install.sh VENV EXTRAS     EXTRAS: "base", or extras of pyproject.toml ("test,dev")
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$1
EXTRAS=$2
PYTHON=${PYTHON:-python3}
TORCH_VERSION=${TORCH_VERSION:-2.13.0}

say() { printf '== %s\n' "$*"; }
die() { printf 'headway install: %s\n' "$*" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || die "$PYTHON is not on PATH; install Python 3.10 to 3.13 or set PYTHON=..."
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' ||
    die "$("$PYTHON" --version) is not supported; set PYTHON=... to a Python from 3.10 to 3.13"

# One stamp per set of extras, named after what decides the outcome.
key=$( (cat pyproject.toml deploy/install.sh; echo "$EXTRAS $TORCH_VERSION"; "$PYTHON" --version) | cksum | cut -d' ' -f1)
stamp=$VENV/.headway-$EXTRAS-$key
[ -f "$stamp" ] && exit 0

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" || die "cannot create $VENV; on Debian: apt-get install python3-venv"
fi
free_kib=$(df -Pk "$VENV" | awk 'NR==2 {print $4}')
[ "$free_kib" -gt 4194304 ] || die "$((free_kib / 1024)) MiB are free on the disk of $VENV, 4096 MiB are needed"

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
hint="see the lines above; without network access set PIP_INDEX_URL or PIP_FIND_LINKS to where packages are"

# torch first and by itself: resolved together with the rest, pip may try several builds of it.
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    say "installing torch $TORCH_VERSION (the largest download)"
    pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$TORCH_VERSION" ||
        die "torch $TORCH_VERSION could not be installed; $hint"
fi
target=.
[ "$EXTRAS" = base ] || target=".[$EXTRAS]"
say "installing Headway ($EXTRAS)"
pip install --quiet --editable "$target" || die "Headway's dependencies could not be installed; $hint"
rm -f "$VENV/.headway-$EXTRAS-"*
touch "$stamp"
say "installed in $VENV"
