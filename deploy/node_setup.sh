#!/usr/bin/env bash
# Runs on every node before Ray starts: a virtual environment with the wheel in it. Idempotent.
# usage: node_setup.sh WHEEL_FOLDER     the environment is ~/headway/venv
#
# PYTHON              interpreter to use (default: python3), the same version on all nodes
# TORCH_VERSION       of the wheel from PyPI (default: 2.13.0); TORCH_INDEX_URL for another index
# HEADWAY_PACKAGES    for nodes without a network: a site-packages folder that has everything but
#                     Headway itself; nothing is downloaded then
set -euo pipefail

WHEELS=$1
VENV=$HOME/headway/venv
PYTHON=${PYTHON:-python3}
TORCH_VERSION=${TORCH_VERSION:-2.13.0}

die() { printf 'headway node setup on %s: %s\n' "$(hostname)" "$*" >&2; exit 1; }

wheel=$(ls -t "$WHEELS"/headway_serving-*.whl 2>/dev/null | head -1)
[ -n "$wheel" ] || die "no headway_serving-*.whl in $WHEELS; deploy/up builds it"
stamp=$VENV/.headway-$(cksum <"$wheel" | cut -d' ' -f1)
[ -f "$stamp" ] && exit 0

command -v "$PYTHON" >/dev/null || die "$PYTHON is not on PATH; install Python 3.10 to 3.13 or set PYTHON"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || die "cannot create $VENV; on Debian: apt-get install python3-venv"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

if [ -n "${HEADWAY_PACKAGES:-}" ]; then
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$HEADWAY_PACKAGES" >"$site/headway-packages.pth"
    pip install --no-index --no-deps --force-reinstall "$wheel" || die "the wheel could not be installed"
    printf '#!/bin/sh\nexec %s/bin/python -m ray.scripts.scripts "$@"\n' "$VENV" >"$VENV/bin/ray"
    chmod +x "$VENV/bin/ray"
else
    "$VENV/bin/python" -c 'import torch' 2>/dev/null ||
        pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$TORCH_VERSION" ||
        die "torch $TORCH_VERSION could not be installed; set PIP_INDEX_URL or TORCH_INDEX_URL"
    pip install "$wheel" || die "Headway's dependencies could not be installed; set PIP_INDEX_URL"
    pip install --no-deps --force-reinstall "$wheel"
fi
rm -f "$VENV"/.headway-*
touch "$stamp"
