#!/bin/bash
# The causal experts as one chain of jobs: each waits until the one before it has ended well.
#
#   bash slurm/causal.sh configs/causal/dev.env             # minutes, on CPUs
#   bash slurm/causal.sh configs/causal/production.env      # 100,000 attempts on 20 nodes, then GPUs
#   DRY_RUN=1 bash slurm/causal.sh configs/causal/dev.env   # print the jobs, queue nothing
#
# collect (an array, each task with a seed of its own) -> dataset (validate, split, prepare) -> surrogate -> acquisition
# (GRPO). `atropos status $DATA/demos/seed0` shows how far a task is, `squeue --me` what waits for what. A job at its time
# limit queues itself again and continues; the ones behind it wait. Submit again after a failure: done work is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -ne 1 ] || [ ! -f "$1" ]; then
    echo "usage: bash slurm/causal.sh SETTINGS.env, as configs/causal/dev.env" >&2
    exit 2
fi
set -a # jobs get the settings as their environment
# shellcheck source=/dev/null
source "$1"
set +a

# submit NAME DEPENDENCY ARGS...: queue a job, or print it; its number in $job
submit() {
    local name=$1 after=$2 options=()
    shift 2
    [ -z "$after" ] || options=(--dependency="afterok:$after")
    if [ -n "${DRY_RUN:-}" ]; then
        echo "sbatch ${options[*]} $*"
        job="<$name>"
        return
    fi
    job=$(sbatch --parsable "${options[@]}" "$@")
    job=${job%%;*}
    echo "$name: job $job${after:+ after $after}"
}

[ -n "${DRY_RUN:-}" ] || mkdir -p "$DATA"
# shellcheck disable=SC2086 # options are words
{
    submit collect "" --job-name=causal-collect --array="0-$((TASKS - 1))" $COLLECT_OPTIONS slurm/causal.slurm collect
    submit dataset "$job" --job-name=causal-dataset $DATASET_OPTIONS slurm/causal.slurm dataset
    submit surrogate "$job" --job-name=causal-surrogate $SURROGATE_OPTIONS slurm/causal.slurm surrogate
    if [ -n "${RECIPE:-}" ]; then
        submit acquisition "$job" --job-name=causal-grpo $TRAIN_OPTIONS slurm/train.slurm "$RECIPE" --run-dir "$DATA/grpo"
    fi
}
