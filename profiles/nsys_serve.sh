#!/usr/bin/env bash
# Record `vllm serve` with the connector under Nsight Systems, send it a prompt cold and warm, and report the overlap.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: profiles/nsys_serve.sh [OPTIONS] MODEL [-- ARGUMENTS OF vllm serve ...]

Starts vLLM's OpenAI server with LayerStream under Nsight Systems, sends it a long prompt, gives it time to be saved,
clears vLLM's own prefix cache, and records while the same prompt is served again, from host memory. Writes
NAME.nsys-rep, exports NAME.sqlite, and prints the report of profiles/overlap.py.

  -o, --output NAME   files to write, without a suffix (default: out/nsys-serve)
  -t, --tokens N      length of the prompt in tokens (default: 4000)
  -r, --requests N    warm requests that are recorded (default: 3)
  -w, --wait SECONDS  longest wait for the server to be ready (default: 900)
  -p, --port PORT     of the server (default: 8765)
  -h, --help          this text

Only the warm requests are recorded (capture range: vLLM's CUDA profiler calls), with CUDA graphs traced node by node.
Options of the connector: LAYERSTREAM_OPTIONS, a JSON object; without it every hit is loaded, layer by layer. The
interpreter is $PYTHON, else the checkout's .venv, else python3; nsys is $NSYS, else the one on the path.
TEXT
}

fail() {
    echo "nsys_serve: $1" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=$root/out/nsys-serve tokens=4000 requests=3 wait_s=900 port=8765 model=
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --) shift && break ;;
        -o | --output | -t | --tokens | -r | --requests | -w | --wait | -p | --port)
            [ $# -ge 2 ] || fail "$1 needs a value; see --help"
            case $1 in
                -o | --output) output=$2 ;;
                -t | --tokens) tokens=$2 ;;
                -r | --requests) requests=$2 ;;
                -w | --wait) wait_s=$2 ;;
                -p | --port) port=$2 ;;
            esac
            shift 2
            ;;
        -*) fail "$1 is no option; see --help (options of vllm serve follow --)" ;;
        *)
            [ -z "$model" ] || fail "two models, $model and $1; options of vllm serve follow --"
            model=$1
            shift
            ;;
    esac
done
[ -n "$model" ] || fail "name a model; see --help"
for number in "$tokens" "$requests" "$wait_s" "$port"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || fail "$number is not a whole number above 0; see --help"
done

nsys=${NSYS:-nsys}
command -v "$nsys" >/dev/null || fail "$nsys is not there; install NVIDIA Nsight Systems, or name its nsys in NSYS"
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
mkdir -p "$(dirname "$output")"
case $output in /*) ;; *) output=$PWD/$output ;; esac

options=${LAYERSTREAM_OPTIONS:-'{"load_mode":"layerwise","recompute":"never"}'}
transfer='{"kv_connector":"LayerStreamConnector","kv_role":"kv_both","kv_connector_extra_config":'$options'}'

# The development endpoint clears the prefix cache, the profiler's endpoints mark the capture range. Kernels are
# launched by the server's children, which nsys has to follow.
export VLLM_SERVER_DEV_MODE=1 VLLM_WORKER_MULTIPROC_METHOD=spawn
"$nsys" profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample=none --cpuctxsw=none \
    --trace-fork-before-exec=true --capture-range=cudaProfilerApi --capture-range-end=stop-shutdown --kill=sigterm \
    --force-overwrite=true --output="$output" \
    "$python" -m vllm.entrypoints.openai.api_server --model "$model" --port "$port" \
    --kv-transfer-config "$transfer" --profiler-config '{"profiler":"cuda"}' "$@" >"$output.log" 2>&1 &
profiled=$!
trap 'kill "$profiled" 2>/dev/null || true' EXIT

cd "$root"
"$python" -m profiles.serve_client --port "$port" --model "$model" --tokens "$tokens" --requests "$requests" \
    --wait "$wait_s" --pid "$profiled" || fail "the requests failed; the server's log is $output.log"
# nsys ends the server with the capture range; with several ranks, at the first one's end.
for _ in $(seq 120); do
    kill -0 "$profiled" 2>/dev/null || break
    sleep 1
done
kill -TERM "$profiled" 2>/dev/null || true
wait "$profiled" || true
trap - EXIT
[ -s "$output.nsys-rep" ] || fail "nsys wrote no $output.nsys-rep; the server's log is $output.log"
"$nsys" export --type=sqlite --force-overwrite=true --output="$output.sqlite" "$output.nsys-rep"
exec "$python" -m profiles.overlap "$output.sqlite"
