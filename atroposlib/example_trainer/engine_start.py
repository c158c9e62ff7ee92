"""Becomes an engine that serves the newest weights which the run has exported.

    python -m atroposlib.example_trainer.engine_start sglang runs/grpo/checkpoints/engine COMMAND OF THE ENGINE ...

A supervisor starts an engine that died with the command of its first start, and what is newest is known only now.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atroposlib.example_trainer.exports import ADAPTER_NAME, CURRENT, CURRENT_ADAPTER, CURRENT_GGUF, version_behind


def newest_flags(weight_sync: str, exports: Path) -> list[str]:
    """Flags for the newest export; none before the first.

    Args:
        weight_sync: the kind that the trainer pushes with. vLLM cannot be told a version when it starts.
    """
    if weight_sync == "vllm_lora":
        adapter = exports / CURRENT_ADAPTER
        return ["--lora-modules", f"{ADAPTER_NAME}={adapter}"] if adapter.exists() else []
    if weight_sync == "embedded":
        weights = exports / CURRENT_GGUF
        return ["--weights", str(weights.resolve()), *_version(weights)] if weights.exists() else []
    return _version(exports / CURRENT) if weight_sync == "sglang" else []


def _version(weights: Path) -> list[str]:
    version = version_behind(weights)
    return [] if version is None else ["--weight-version", version]


def main(argv: Sequence[str]) -> None:
    """Replace this process; its pid, process group and log stay."""
    weight_sync, exports, *command = argv
    os.execvp(command[0], [*command, *newest_flags(weight_sync, Path(exports))])


if __name__ == "__main__":
    main(sys.argv[1:])
