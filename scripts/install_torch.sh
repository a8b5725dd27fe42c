#!/bin/sh
# Install PyTorch into the Python given as $1, in the version that constraints.txt names.
#
# On Linux the wheel of the plain package index is the CUDA build, several gigabytes. Without an NVIDIA
# GPU the CPU wheels are asked for first, for a few seconds, then whatever index pip is set up with.
# TORCH_INDEX_URL, if set, is used instead of both.
set -eu

python=$1
constraints="$(dirname "$0")/../constraints.txt"
requirement=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$constraints")
version=${requirement#torch==}

if "$python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null
then
    echo "PyTorch $version is there"
    exit 0
fi

if [ -n "${TORCH_INDEX_URL:-}" ]; then
    exec "$python" -m pip install --quiet --index-url "$TORCH_INDEX_URL" "$requirement"
fi

if [ "$(uname -s)" = Linux ] && [ "$(uname -m)" = x86_64 ] && ! command -v nvidia-smi >/dev/null 2>&1
then
    cpu=https://download.pytorch.org/whl/cpu
    # A short look first: an index that cannot be reached should cost seconds, not pip's retries.
    if "$python" - "$cpu/torch/" <<'EOF' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
EOF
    then
        echo "installing $requirement, CPU build"
        if "$python" -m pip install --quiet --index-url "$cpu" "$requirement"; then
            exit 0
        fi
        echo "that failed; trying pip's own index"
    else
        echo "the index of PyTorch's CPU wheels cannot be reached; using pip's own"
    fi
fi
echo "installing $requirement"
exec "$python" -m pip install --quiet "$requirement"
