"""What upstream's example trainer does at the API, with upstream's own functions; run by upstream's interpreter.

    python upstream_trainer.py API_URL BATCHES

Prints the batches as one JSON list. The package and its config module need torch, its API functions do not: they only
read attributes of the config, so a plain object stands in.
"""

import importlib
import importlib.util
import json
import sys
import time
import types
from pathlib import Path


def upstream_api():
    spec = importlib.util.find_spec("atroposlib")
    folder = Path(next(iter(spec.submodule_search_locations))).parent / "example_trainer"
    package, config = types.ModuleType("example_trainer"), types.ModuleType("example_trainer.config")
    package.__path__, config.TrainingConfig = [str(folder)], types.SimpleNamespace
    sys.modules.update({"example_trainer": package, "example_trainer.config": config})
    return importlib.import_module("example_trainer.api")


def main(url: str, wanted: int) -> None:
    api = upstream_api()
    sys.stdout, results = sys.stderr, sys.stdout
    if not api.check_atropos_api(url):
        raise SystemExit("the API did not answer")
    api.register_trainer(
        types.SimpleNamespace(
            atropos_url=url,
            wandb_group=None,
            wandb_project=None,
            batch_size=4,
            gradient_accumulation_steps=2,
            seq_len=512,
            save_path="",
            checkpoint_interval=0,
            training_steps=wanted,
        )
    )
    batches = []
    while len(batches) < wanted:
        batch = api.get_batch(url)["batch"]
        if batch is None:
            time.sleep(0.2)
        else:
            batches.append(batch)
    json.dump(batches, results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
