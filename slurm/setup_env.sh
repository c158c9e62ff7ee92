#!/bin/bash
# Makes the environment that the scripts in this folder use, on a login node, once:
#
#   bash slurm/setup_env.sh                  # .venv with SGLang, the trainer and the environments
#   EXTRAS=local bash slurm/setup_env.sh     # the CPU engine only
#   PYTHON=python3.12 VENV=$SCRATCH/venv bash slurm/setup_env.sh     # then ATROPOS_VENV=$SCRATCH/venv sbatch ...
#
# The folder must be seen by all nodes. Running it again updates the packages.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-sglang,trainer,envs}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$PYTHON is $("$PYTHON" -V 2>&1); Python 3.11 or newer is needed: load a module or set PYTHON" >&2
    exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --upgrade pip
"$VENV/bin/python" -m pip install --quiet -e ".[$EXTRAS]"
"$VENV/bin/atropos" datagen configs/quickstart.yaml --help >/dev/null
echo "ready: $VENV with atroposlib[$EXTRAS]"
if [ ! -d ~/InternBootcamp ]; then
    echo "to do: the problems, in a folder that all nodes see:"
    echo "       git clone https://github.com/InternLM/InternBootcamp ~/InternBootcamp"
    echo "       $VENV/bin/python -m pip install -r ~/InternBootcamp/requirements.txt    # what its classes import"
    echo "       (elsewhere: INTERNBOOTCAMP=\$SCRATCH/InternBootcamp sbatch ...; without: --set environment.env.task_name=reasoning_gym)"
fi
echo "once:  $VENV/bin/python -m atroposlib.environments.intern_bootcamp.quarantine --path ~/InternBootcamp --output quarantine.json"
echo "       then QUARANTINE=\$PWD/quarantine.json sbatch ..., which leaves out the classes that do not work here"
echo "next:  $VENV/bin/atropos datagen configs/intern_bootcamp_r1.yaml --check"
