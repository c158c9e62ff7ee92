"""What an export did: returned to the caller and recorded beside the output as `<output>.meta.json`."""

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import orjson

from atroposlib.data.contents import Contamination
from atroposlib.data.output import write_whole
from atroposlib.data.policy import Policy, Selection, StepResult
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Table
from atroposlib.errors import DataError
from atroposlib.json_lines import one_line
from atroposlib.paths import shown
from atroposlib.type_definitions import Array


class NothingKept(DataError):
    """The policy, the rule for pairs or odd rows left nothing to write; the rollouts are still there."""


def our_version() -> str:
    """Of the installed package; a source tree that is only on the path has none."""
    try:
        return version("atroposlib")
    except PackageNotFoundError:
        return "(not installed)"


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
    output_bytes: int  # of the whole file, what was there before included
    copies: int = 0  # records that equal an earlier one but for their scores
    tokenizer: str | None = None
    tasks: dict[str, int] = field(default_factory=dict)  # responses kept per task
    contamination: list[Contamination] = field(default_factory=list)
    set_aside: list[dict[str, Any]] = field(default_factory=list)  # by reason: lines and responses, the first by name
    version: str = field(default_factory=our_version)
    created_at: float = field(default_factory=time.time)


def describe_export(
    output: Path,
    table: Table,
    policy: Policy,
    selection: Selection,
    keep: Array,
    *,
    format: str,
    tokenizer: str | None,
    records: int,
    size: int,
    odd: SetAside,
    copies: int,
    rerendered: int = 0,
) -> ExportReport:
    """The report of one export: `records` lines from the responses in `keep`; the output has `size` bytes.

    `odd` are the responses that could not be used; the table has the lines.
    """
    set_aside = SetAside()
    for each in (table.set_aside, odd):
        set_aside.update(each)
    tasks = Counter(table.column("task")[keep].tolist())
    return ExportReport(
        output=str(output),
        format=format,
        records=records,
        responses=len(table.responses),
        kept=int(keep.sum()),
        groups=len(table.groups),
        copies=copies,
        rerendered=rerendered,
        steps=selection.steps,
        policy=policy.model_dump(),
        inputs=[
            {"path": shown(path), "bytes": path.stat().st_size, "modified": path.stat().st_mtime}
            for path in table.files
        ],
        output_bytes=size,
        tokenizer=tokenizer,
        tasks={table.tasks[code]: count for code, count in sorted(tasks.items())},
        contamination=selection.contamination,
        set_aside=set_aside.as_json(),
    )


def write_meta(output: Path, report: ExportReport) -> Path:
    """Record beside the output how it was made; returns the path.

    What a decontamination step found goes to `<output>.contamination.jsonl`, one response a line; when it found
    nothing, an earlier export's is removed.
    """
    path = _meta_path(output)
    facts = asdict(report)
    hits = facts.pop("contamination")
    found = output.with_name(output.name + ".contamination.jsonl")
    if hits:
        write_whole(found, b"".join(one_line(orjson.dumps(hit)) + b"\n" for hit in hits))
    else:
        found.unlink(missing_ok=True)
    write_whole(path, orjson.dumps({**facts, "contaminated": len(hits)}, option=orjson.OPT_INDENT_2))
    return path


def finished_report(output: Path, rollouts: Path) -> ExportReport | None:
    """What is recorded of the export of `rollouts` to `output`; None unless it was carried out to its end."""
    try:
        report = msgspec.json.decode(_meta_path(output).read_bytes(), type=ExportReport)
        (source,) = report.inputs
        recorded = (report.output_bytes, source["path"], source["bytes"])
        is_finished = recorded == (output.stat().st_size, str(rollouts), rollouts.stat().st_size)
    except (OSError, ValueError, KeyError, msgspec.DecodeError):
        return None
    return report if is_finished else None


def is_dataset(path: Path) -> bool:
    """Whether `path` is an output of ours: beside it lies how it was made."""
    return _meta_path(path).exists()


def _meta_path(output: Path) -> Path:
    return output.with_name(output.name + ".meta.json")


def require_groups(table: Table) -> None:
    """`NothingKept` when the table is empty."""
    if not len(table.groups):
        raise NothingKept(
            f"there is no group in {', '.join(map(str, table.files[:3]))}{', ...' if len(table.files) > 3 else ''}: "
            + (f"{table.set_aside.rows[0].text}. Set aside: {table.set_aside}" if table.set_aside else "it is empty")
        )


def require_survivors(table: Table, selection: Selection) -> None:
    """`NothingKept` when the policy left nothing; says which step dropped how many."""
    require_groups(table)
    if selection.keep.any():
        return
    odd = table.odd_responses()
    if len(odd) == len(table.responses):
        raise NothingKept(f"no response can be used; nothing was written. Set aside: {odd}")
    dropped = [f"{step.step} dropped {step.dropped}" for step in selection.steps]
    dropped += [f"set aside {each}" for each in (table.set_aside, odd) if each]
    raise NothingKept(
        f"no response survived of {len(table.responses)} in {len(table.groups)} groups ({', '.join(dropped)}); "
        "nothing was written. Loosen the policy (--min-score, --allow-negative-scores) or check the scores with "
        "`atropos data stats`"
    )


def require_records(count: int, table: Table, odd: SetAside) -> None:
    """`NothingKept` when no chosen response could be converted."""
    if not count:
        first = f"{odd.rows[0].where}: {odd.rows[0].text}. " if odd.rows else ""
        raise NothingKept(
            f"{first}None of {len(table.responses)} responses in {len(table.groups)} groups could be converted; "
            f"nothing was written. Set aside: {odd}"
        )
