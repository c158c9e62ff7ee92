"""The `atropos` command: one entry, one module per subcommand, each imported only when it is called."""

import importlib
import sys

COMMANDS = {
    "datagen": ("atroposlib.cli.datagen", "run engine, API, environment and export as one supervised job"),
    "status": ("atroposlib.cli.status", "show the progress of a run, running or not"),
    "cluster": ("atroposlib.cli.cluster", "queue jobs on a SLURM cluster over ssh, watch them, bring the data back"),
    "engine": ("atroposlib.cli.engine", "serve a model on CPU with SGLang's wire protocol"),
    "data": ("atroposlib.cli.data", "validate, count, compare, split, merge, describe and show rollout files"),
}

USAGE = "\n".join(
    [
        "Usage: atropos COMMAND [OPTIONS]    (atropos COMMAND --help shows its options)",
        "",
        *(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "Also installed (each has --help): run-api, atropos-sft-gen, atropos-dpo-gen, view-run, view-run-multimodal,",
        "atropos-fake-trainer, atropos-grpo, atropos-grpo-run, inference-node-wandb-watcher.",
    ]
)


def main() -> None:
    """Run one subcommand. Exit 0 done, 1 failed with a sentence, 2 wrong usage."""
    if len(sys.argv) < 2 or sys.argv[1] in {"-h", "--help"}:
        print(USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    name = sys.argv.pop(1)
    if name not in COMMANDS:
        print(f"atropos: there is no command {name!r}\n\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    sys.argv[0] = f"atropos {name}"
    importlib.import_module(COMMANDS[name][0]).main()
