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
    trap 'kill -TERM "$run" 2>/dev/null; ! past_time_limit || queue_again' TERM
    [ -z "$usr1" ] || kill -USR1 "$run"

    # `wait` returns early when a signal arrives
    wait "$run"; code=$?
    while kill -0 "$run" 2>/dev/null; do
        wait "$run"; code=$?
    done
    if [ "$code" -ne 0 ] && [ -n "$usr1" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
        queue_again
    fi
    return "$code"
}

past_time_limit() {
    scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null | grep -q 'Reason=TimeLimit'
}

# Until the time limit ends the job: the controller may be restarting just now.
queue_again() {
    until scontrol requeue "$SLURM_JOB_ID"; do
        echo "scontrol requeue $SLURM_JOB_ID failed; trying again in 5 s" >&2
        sleep 5
    done
}
