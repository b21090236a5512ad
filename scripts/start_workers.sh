#!/usr/bin/env bash
# Rollout workers on this machine for a training on another one: start_workers.sh CONFIG [COUNT] [FIRST_PORT] [SET...]
# One worker a GPU (COUNT GPUs, default: all), or COUNT workers on a CPU; each SET is passed on as --set SET.
# Prints what the training needs and runs until it is stopped; then all of them stop. The ports have no password: use a
# private network (HOST=10.0.0.5 listens on that address alone). The training's rollout.weights_dir must be a folder that both machines see under the same path.
set -euo pipefail
CONFIG=${1:?usage: start_workers.sh CONFIG [COUNT] [FIRST_PORT] [SET...]}
GPUS=$(nvidia-smi -L 2>/dev/null | wc -l || true)
COUNT=${2:-$((GPUS > 0 ? GPUS : 1))}
FIRST=${3:-8000}
sets=()
for word in "${@:4}"; do sets+=(--set "$word"); done

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM
urls=()
for ((i = 0; i < COUNT; i++)); do
    port=$((FIRST + i))
    [ "$GPUS" -gt 0 ] && export CUDA_VISIBLE_DEVICES=$i
    grpo-lab worker --config "$CONFIG" --host "${HOST:-0.0.0.0}" --port "$port" "${sets[@]}" >"worker-$port.log" 2>&1 &
    pids+=($!)
    urls+=("http://$(hostname):$port")
done
echo "workers    $COUNT starting; $PWD/worker-PORT.log says when each is up; Ctrl-C stops them"
echo "attach     grpo-lab train --config $CONFIG --set 'rollout.urls=[$(IFS=,; echo "${urls[*]}")]' --set rollout.weights_dir=SHARED_FOLDER"
wait -n || true
echo "a worker ended; see its log" >&2
exit 1
