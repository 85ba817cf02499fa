#!/bin/sh
# Makes the virtual environment: make-venv.sh PYTHON VENV
set -eu
python=$1
venv=$2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "gpuimg needs Python 3.11 or newer and '$python' is not that; install it, or run: make PYTHON=/path/to/python3" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing python3-venv"
        apt-get -qq update && apt-get -qq install -y python3-venv >/dev/null
    else
        echo "the venv module is missing; install it first: apt-get install python3-venv" >&2
        exit 1
    fi
fi
# The compiled kernel is optional: without it the same work is done in numpy, more slowly.
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
if ! command -v cc >/dev/null || ! [ -e "$headers" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing a C compiler and Python's headers"
        apt-get -qq update && apt-get -qq install -y gcc libc6-dev python3-dev >/dev/null
    else
        echo "no C compiler or no Python headers (apt-get install gcc libc6-dev python3-dev):" \
            "gpuimg will work without its compiled kernel, more slowly" >&2
    fi
fi
echo "making $venv (once; takes about half a minute)"
"$python" -m venv "$venv"
# A plain path entry: the import hook of the default editable mode costs every start 10 ms.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --config-settings editable_mode=compat --editable '.[s3,test,dev]'
