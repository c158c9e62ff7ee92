#!/usr/bin/env bash
# From an empty folder to a training set made by an environment of one's own, with the commands that `atropos new` prints.
#   bash tests/first_environment.sh          # in an activated environment with '.[local,dev]'; two minutes on two cores
set -euo pipefail
folder=$(mktemp -d)
engine=
trap '[ -z "$engine" ] || kill "$engine" 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"

atropos new env guessing --multi-turn
python -m pytest -q -p no:cacheprovider test_guessing.py
atropos engine --port 0 --slots 8 > engine.log &
engine=$!
for _ in $(seq 600); do
    grep -q 'engine ready' engine.log && break
    kill -0 "$engine" || { cat engine.log; exit 1; }
    sleep 0.2
done
url=$(grep -o 'http://[^ ]*' engine.log | head -1)
python guessing.py process --config guessing.yaml --env.total_steps 3 --openai.base_url "$url/v1"
atropos status data/guessing.jsonl
atropos data validate data/guessing.jsonl
atropos sft data/guessing.jsonl --output sft.jsonl --allow-negative-scores # a model of 135M parameters rarely hits

atropos new env hangman --package
python -m pip install -q --no-deps --target package ./hangman-env
PYTHONPATH=$PWD/package python -m atroposlib.environments.command check hangman

python - <<'PY'
import json
rows = [json.loads(line) for line in open("sft.jsonl")]
assert len(rows) >= 1, "the set is empty"
print(f"{len(rows)} rows; the first: {json.dumps(rows[0])[:300]}")
PY
