"""What an export did: returned to the caller and recorded beside the output as `<output>.meta.json`."""

import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from atroposlib.data.contents import Contamination
from atroposlib.data.output import write_whole
from atroposlib.data.policy import StepResult
from atroposlib.data.table import Table
from atroposlib.errors import DataError


class NothingKept(DataError):
    """The policy, or the rule for pairs, left nothing to write; the rollouts are still there."""


@dataclass(frozen=True)
class ExportReport:
    """What an export did; also written beside the output as `<output>.meta.json`."""

    output: str
    format: str
    records: int  # lines written
    responses: int  # of the rollout files
    kept: int  # responses chosen
    groups: int
    rerendered: int  # responses whose ids were made anew from messages
    steps: list[StepResult]
    policy: dict[str, Any]
    inputs: list[dict[str, Any]]
    tokenizer: str | None = None
    tasks: dict[str, int] = field(default_factory=dict)  # responses kept per task
    contamination: list[Contamination] = field(default_factory=list)
    version: str = field(default_factory=lambda: version("atroposlib"))
    created_at: float = field(default_factory=time.time)


def write_meta(output: Path, report: ExportReport) -> Path:
    """Record beside the output how it was made; returns the path.

    What a decontamination step found goes to `<output>.contamination.jsonl`, one response a line.
    """
    path = output.with_name(output.name + ".meta.json")
    facts = asdict(report)
    hits = facts.pop("contamination")
    if hits:
        found = output.with_name(output.name + ".contamination.jsonl")
        write_whole(found, b"".join(orjson.dumps(hit) + b"\n" for hit in hits))
    write_whole(path, orjson.dumps({**facts, "contaminated": len(hits)}, option=orjson.OPT_INDENT_2))
    return path


def describe_inputs(files: list[Path]) -> list[dict[str, Any]]:
    """Path, size and modification time of each file."""
    return [{"path": str(path), "bytes": path.stat().st_size, "modified": path.stat().st_mtime} for path in files]


def require_survivors(table: Table, steps: list[StepResult]) -> None:
    """`NothingKept` when the last step left nothing; says which step dropped how many."""
    if len(table.responses) and (not steps or steps[-1].kept):
        return
    dropped = ", ".join(f"{step.step} dropped {step.dropped}" for step in steps)
    raise NothingKept(
        f"no response survived of {len(table.responses)} in {len(table.groups)} groups "
        f"({dropped or 'the files are empty'}); "
        "nothing was written. Loosen the policy (--min-score, --allow-negative-scores) or check the scores with "
        "`atropos data stats`"
    )
