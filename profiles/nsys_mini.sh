#!/usr/bin/env bash
# Record examples/mini_engine.py under Nsight Systems and report how much of its loads was hidden.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: profiles/nsys_mini.sh [-o NAME] [--] [ARGUMENTS OF examples/mini_engine.py ...]

Records the example engine on this machine's GPU: host ranges of layerstream (NVTX), CUDA calls, kernels and copies,
CUDA graphs node by node. Writes NAME.nsys-rep (open it in the Nsight Systems window), exports NAME.sqlite, and prints
the report of profiles/overlap.py.

  -o, --output NAME   files to write, without a suffix (default: out/nsys-mini)
  -h, --help          this text

Without further arguments the engine runs as `--device cuda --prompt-tokens 8192`. The interpreter is $PYTHON, else the
checkout's .venv, else python3; nsys is $NSYS, else the one on the path.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=$root/out/nsys-mini
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        -o | --output)
            [ $# -ge 2 ] || { echo "nsys_mini: $1 needs a name; see --help" >&2 && exit 2; }
            output=$2
            shift 2
            ;;
        --) shift && break ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || set -- --device cuda --prompt-tokens 8192

nsys=${NSYS:-nsys}
if ! command -v "$nsys" >/dev/null; then
    echo "nsys_mini: $nsys is not there; install NVIDIA Nsight Systems, or name its nsys in NSYS" >&2
    exit 2
fi
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3

mkdir -p "$(dirname "$output")"
"$nsys" profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample=none --cpuctxsw=none \
    --force-overwrite=true --output="$output" \
    "$python" "$root/examples/mini_engine.py" "$@"
"$nsys" export --type=sqlite --force-overwrite=true --output="$output.sqlite" "$output.nsys-rep"
# From the checkout, where `profiles` can be imported; the names of the files may be relative to here.
case $output in /*) ;; *) output=$PWD/$output ;; esac
cd "$root"
exec "$python" -m profiles.overlap "$output.sqlite"
