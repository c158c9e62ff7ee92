"""Reports of exports: returned to the caller, recorded as `<output>.meta.json`, and summed up in a dataset card."""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypedDict

import msgspec
import orjson
import yaml

from atroposlib import __version__
from atroposlib.data.duplicates import Contamination
from atroposlib.data.output import (
    JsonlWriter,
    ParquetWriter,
    WriteOptions,
    sole_writer,
    write_whole,
    written_whole,
)
from atroposlib.data.policy import Selection, SelectionPolicy, StepResult
from atroposlib.data.rollout_files import expand_input, read_lines, read_rollouts
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Table
from atroposlib.errors import DataError, PathError
from atroposlib.json_lines import object_in, one_line
from atroposlib.paths import shown
from atroposlib.type_definitions import Array, JsonObject

logger = logging.getLogger(__name__)

_OF_PAIRS = ("rejected", "neg", "rejected_input_ids")  # names in every record of atropos dpo, one of them


class NothingKept(DataError):
    """The policy, the rule for pairs or odd rows left nothing to write; the rollouts are still there."""


class Input(TypedDict):
    """A rollout file as it was when it was exported."""

    path: str
    bytes: int
    modified: float


@dataclass(frozen=True)
class ExportReport:
    """The report of an export, also written next to the output as `<output>.meta.json`."""

    output: str
    format: str
    records: int  # lines written
    responses: int  # of the rollout files
    kept: int  # responses chosen
    groups: int
    rerendered: int  # responses whose ids were made again from messages
    steps: list[StepResult]
    policy: JsonObject
    inputs: list[Input]
    output_bytes: int  # of the whole file, what was there before included
    copies: int = 0  # records that equal an earlier one but for their scores
    tokenizer: str | None = None
    tasks: dict[str, int] = field(default_factory=dict)  # responses kept per task
    contaminated: int = 0
    contamination: list[Contamination] = field(default_factory=list)  # listed next to the output
    set_aside: list[JsonObject] = field(default_factory=list)  # by reason: lines and responses, the first by name
    earlier: list[JsonObject] = field(default_factory=list)  # records of the exports that this one was appended to
    version: str = __version__
    created_at: float = field(default_factory=time.time)


def describe_export(
    output: Path,
    table: Table,
    policy: SelectionPolicy,
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
    earlier: list[JsonObject],
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
        inputs=_inputs(table),
        output_bytes=size,
        tokenizer=tokenizer,
        tasks={table.tasks[code]: count for code, count in sorted(tasks.items())},
        contaminated=len(selection.contamination),
        contamination=selection.contamination,
        set_aside=set_aside.as_json(),
        earlier=earlier,
    )


def _inputs(table: Table) -> list[Input]:
    return [
        {"path": shown(path), "bytes": path.stat().st_size, "modified": path.stat().st_mtime} for path in table.files
    ]


@contextmanager
def dataset_writer(
    output: Path, options: WriteOptions, command: str, format: str, table: Table, report: Callable[[int], ExportReport]
) -> Iterator[tuple[JsonlWriter | ParquetWriter, list[JsonObject]]]:
    """A writer of the records of one export, which appear together with `report` of them, and the earlier exports.

    Args:
        report: made when all is written, of the bytes of the whole file.

    Raises:
        PathError: as `sole_writer`, `written_whole` and `check_format`.
    """
    with sole_writer(output, append=options.append, overwrite=options.overwrite):
        if options.append:
            check_format(output, command, format)
        earlier = _exports(output) if options.append else []
        if any(each.inputs == _inputs(table) for each in earlier):
            logger.warning(
                "%s holds records of these rollouts already, of an earlier export; now they are in it twice", output
            )
        with written_whole(
            output, append=options.append, before_rename=lambda size: write_meta(output, report(size))
        ) as writer:
            yield writer, [_facts(replace(each, earlier=[])) for each in earlier]


def check_format(output: Path, command: str, format: str) -> None:
    """Refuse to append to a dataset of another format, which no loader takes in one file.

    Args:
        command: sft or dpo, some of whose formats have one name.

    Raises:
        PathError: `output` was made as another format.
    """
    exports = _exports(output)
    if not exports or (line := next(read_lines(output), None)) is None:
        return
    first = object_in(line.data) or {}
    there = "dpo" if any(name in first for name in _OF_PAIRS) else "sft"
    found = next((each.format for each in exports if each.format != format), format)
    if (there, found) != (command, format):
        raise PathError(
            f"{output} holds records of atropos {there} --format {found}, found atropos {command} --format {format}; "
            "append records of one format, or give another output"
        )


def _exports(output: Path) -> list[ExportReport]:
    """Return the reports of the exports that `output` is made of, the first one first; [] where none is recorded.

    Raises:
        DataError: the record is damaged.
    """
    path = _meta_path(output)
    if not (output.exists() and path.exists()):
        return []
    try:
        newest = msgspec.json.decode(path.read_bytes(), type=ExportReport)
        exports = [*msgspec.convert(newest.earlier, list[ExportReport]), newest]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); mend it, or make the dataset again") from error
    sizes = [each.output_bytes for each in exports]  # one that was killed before its rename is not in the file
    size = output.stat().st_size
    return exports[: sizes.index(size) + 1] if size in sizes else exports


def _facts(report: ExportReport) -> JsonObject:
    return {name: value for name, value in asdict(report).items() if name != "contamination"}


def write_meta(output: Path, report: ExportReport) -> Path:
    """Record next to the output how it was made; returns the path.

    What a decontamination step found goes to `<output>.contamination.jsonl`, one response a line; when it found
    nothing, an earlier export's is removed.
    """
    path = _meta_path(output)
    found = output.with_name(output.name + ".contamination.jsonl")
    if report.contamination:
        write_whole(found, b"".join(one_line(orjson.dumps(hit)) + b"\n" for hit in report.contamination))
    else:
        found.unlink(missing_ok=True)
    write_whole(path, orjson.dumps(_facts(report), option=orjson.OPT_INDENT_2))
    return path


def finished_report(output: Path, rollouts: Path) -> ExportReport | None:
    """Return what is recorded of the export of `rollouts` to `output`; None unless it was carried out to its end."""
    try:
        *_, report = _exports(output)
        (source,) = report.inputs
        recorded = (report.output_bytes, source["path"], source["bytes"])
        is_finished = recorded == (output.stat().st_size, str(rollouts), rollouts.stat().st_size)
    except (OSError, ValueError, DataError):
        return None
    return report if is_finished else None


def is_dataset(path: Path) -> bool:
    """Return True when `path` is an output of ours: next to it lies how it was made."""
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


_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def dataset_card(dataset: str | Path, *, name: str | None = None, license_id: str = "other") -> str:
    """The README.md of a dataset made by `atropos-sft-gen` or `atropos-dpo-gen`.

    Args:
        dataset: the output; its `.meta.json` must lie next to it.
        name: title; default the file's name.
        license_id: Hugging Face licence id of the data.

    Raises:
        PathError: there is no such file.
        DataError: no `.meta.json`, or one that cannot be read.
    """
    path = expand_input(str(dataset))
    if not path.is_file():
        raise PathError(f"{path} is no file; give the dataset that atropos sft or atropos dpo made")
    exports = _exports(path)
    if not exports:
        raise DataError(f"{_meta_path(path)} cannot be read: there is none; a card needs what the export recorded")
    newest = exports[-1]
    total = {name: sum(getattr(each, name) for each in exports) for name in ("records", "kept", "responses", "groups")}
    front = {
        "license": license_id,
        "task_categories": ["text-generation"],
        "size_categories": [next((label for limit, label in _SIZES if total["records"] < limit), "n>1M")],
        "tags": ["atropos", "reinforcement-learning", "rejection-sampling", newest.format],
        "configs": [{"config_name": "default", "data_files": path.name}],
    }
    inputs = [*dict.fromkeys(Path(each["path"]) for export in exports for each in export.inputs)]
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {name or path.stem}\n",
        f"{total['records']} records in format `{newest.format}`, made from {total['kept']} of {total['responses']} "
        f"scored responses in {total['groups']} groups by atroposlib {newest.version}.\n",
        *chain.from_iterable(map(_selected, exports)),
        _table("Generated by", ("model", "sampling"), _engines(inputs)),
        _table("Files", ("file", "bytes", "sha256"), [_fingerprint(each) for each in (path, *inputs)]),
        f"Card written by atroposlib {__version__}.\n",
    ]
    return "\n".join(section for section in sections if section)


def _selected(export: ExportReport) -> list[str]:
    """Sections on what one export chose."""
    steps = [(step.step, step.kept, step.dropped) for step in export.steps]
    return [
        _table("Selection", ("step", "kept", "dropped"), steps),
        _table("Responses by task", ("task", "kept"), list(export.tasks.items())),
        "## Policy\n\n```yaml\n" + yaml.safe_dump(export.policy, sort_keys=False) + "```\n",
    ]


def _engines(inputs: list[Path]) -> list[tuple[str, str]]:
    """Model and sampling of the first group of each file, each combination once."""
    found: dict[tuple[str, str], None] = {}
    for path in inputs:
        if not path.exists():
            continue
        record = next(read_rollouts(path, odd=SetAside()), {})
        engine, sampling = record.get("engine"), record.get("sampling") or record.get("generation_params")
        if engine or sampling:
            model = engine.get("model", "?") if isinstance(engine, dict) else "?"
            found[str(model), orjson.dumps(sampling).decode()] = None
    return list(found)


def _fingerprint(path: Path) -> tuple[str, str, str]:
    if not path.exists():
        return path.name, "-", "no longer there"
    with path.open("rb") as stream:
        return path.name, str(path.stat().st_size), hashlib.file_digest(stream, "sha256").hexdigest()


def _table(title: str, head: tuple[str, ...], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in row) for row in rows]
    return f"## {title}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"
