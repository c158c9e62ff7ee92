# shellcheck shell=bash
# run_chained COMMAND [ARG...]: one link of a chain of SLURM jobs. Source this file first, call it last.
#
#   the command ends          its exit code is the job's, and the chain is over
#   USR1 before a time limit  the command gets USR1 and stops; unless it was done, the same job is queued again
#   TERM (scancel)            the command gets TERM and stops; nothing is queued, unless TERM came from the time
#                             limit itself, as when USR1 was lost: then the job is queued again first
#
# A failed node or a preemption queues the job again by itself (#SBATCH --requeue). USR1 may come at any moment, also
# before the command can take it: then it ends the command, which loses nothing.

usr1=
trap 'usr1=yes' USR1

run_chained() {
    local run code
    "$@" &
    run=$!
    trap 'usr1=yes; kill -USR1 "$run" 2>/dev/null' USR1
    trap 'kill -TERM "$run" 2>/dev/null; queue_again "Reason=TimeLimit"' TERM
    [ -z "$usr1" ] || kill -USR1 "$run"

    # `wait` returns early when a signal arrives, also when the command has ended meanwhile
    while kill -0 "$run" 2>/dev/null; do
        wait "$run"
    done
    wait "$run"; code=$?
    if [ "$code" -ne 0 ] && [ -n "$usr1" ]; then
        queue_again "JobState=RUNNING"
    fi
    return "$code"
}

# Queue this job again if `scontrol show job` says WORD of it: a cancelled one would come back to life. Tried until the
# time limit ends the job, as the controller may be restarting just now. An array's first task has the number of the
# whole array, so a task is named by both.
queue_again() {
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} facts
    job=${job:-${SLURM_JOB_ID:-}}
    while [ -n "$job" ]; do
        if facts=$(scontrol show job -o "$job"); then
            [[ $facts == *"$1"* ]] || return
            scontrol requeue "$job" && return
        fi
        echo "job $job could not be queued again; trying again in 5 s" >&2
        sleep 5
    done
}
