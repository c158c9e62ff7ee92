"""The commands `atropos data validate`, `split` and `prepare` for demonstrations."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from atroposlib import __version__
from atroposlib.cli.boundary import reading
from atroposlib.data.output import check_output, refuse_inputs, write_whole, written_whole
from atroposlib.data.rollout_files import CUT_SHORT, find_rollout_files
from atroposlib.data.set_aside import SetAside
from atroposlib.data.split_merge import NAMES, split_rollouts
from atroposlib.data.validate import Validation
from atroposlib.environments.causal.report import LEAST_MEAN_ACCURACY, Report, read_demonstrations
from atroposlib.environments.causal.strata import assign_splits
from atroposlib.environments.causal.tensors import CHANNELS, Format, TensorWriter, examples
from atroposlib.errors import DataError, RowError
from atroposlib.paths import expand_path, writable_dir, write_text_atomic
from atroposlib.type_definitions import Json, JsonObject


def validate(
    rollouts: list[str], *, max_shown: int, as_json: bool, html: str | None, overwrite: bool, strict: bool
) -> None:
    """Check demonstrations as lines and as runs of the expert, and report on them; see `atropos data validate`."""
    page = check_output(html, what="--html", overwrite=overwrite) if html else None
    refuse_inputs([page] if page else [], find_rollout_files(rollouts), what="--html")
    lines, report, odd = Validation(), Report(), SetAside()
    with reading(rollouts, passes=2) as advance:
        for problem in lines.problems(rollouts, advance):
            if problem.is_damage:
                odd.add(RowError(problem.where, problem.reason, problem.text))
        for where, _, found in read_demonstrations(rollouts, advance):
            if not isinstance(found, RowError):
                report.add(found)
            elif found.reason != CUT_SHORT and where not in {row.where for row in odd.rows}:
                odd.add(found)
            if strict and odd:
                break
    if page:
        write_whole(page, report.page().encode())
    if as_json:
        print(json.dumps({**report.as_json(), "files": lines.files, "damaged": odd.as_json()}, indent=1))
    else:
        for row in odd.rows[:max_shown]:
            print(f"damage: {row.where}: {row.text}")
        print(report.text())
        print(f"{lines.groups} demonstrations in {lines.files} files, {len(odd)} damaged")
    if odd or not lines.groups:
        raise typer.Exit(1)
    if report.mean_accuracy <= LEAST_MEAN_ACCURACY:
        raise DataError(f"mean accuracy {report.mean_accuracy:.3f} of all attempts is not above {LEAST_MEAN_ACCURACY}")


def split(rollouts: list[str], folder: str, *, seed: int, shares: Sequence[float], **options: Any) -> dict[str, int]:
    """Split demonstrations by model, and write a catalog; see `atropos data split`."""
    counts = split_rollouts(rollouts, folder, shares=shares, seed=seed, assign=assign_splits, **options)
    target = expand_path(folder)
    outputs = [path for name in counts if (path := target / f"{name}.jsonl").exists()]
    settings = {"shares": list(shares), "seed": seed, "strata": "level, graph type, accuracy"}
    write_catalog(target, rollouts, outputs, counts=counts, settings=settings)
    return counts


def prepare(
    rollouts: list[str],
    folder: str,
    *,
    file_format: Format,
    everything: bool,
    last_state: bool,
    chats: bool,
    thoughts: bool,
    overwrite: bool,
    strict: bool,
) -> None:
    """Write tensors and chats of each file, named after its split; see `atropos data prepare`."""
    target = writable_dir(folder, what="--output-dir")
    odd, counts = SetAside(strict=strict), dict[str, int]()
    outputs: list[Path] = []
    stems: dict[str, list[str]] = {}
    for path in find_rollout_files(rollouts):
        stem = path.name.partition(".")[0]
        stems.setdefault(stem if stem in NAMES else "all", []).append(str(path))
    with reading(rollouts) as advance:
        for stem, paths in stems.items():
            writer = TensorWriter(target, stem, format=file_format, overwrite=overwrite)
            chat_file = check_output(target / f"{stem}-chats.jsonl", what="--output-dir", overwrite=overwrite)
            refuse_inputs([chat_file], map(Path, paths), what="--output-dir")
            kept = 0
            with written_whole(chat_file) if chats else nullcontext() as chat_writer:
                for _, _, found in read_demonstrations(paths, advance):
                    if isinstance(found, RowError):
                        odd.add(found)
                    elif everything or found.accepted:
                        kept += 1
                        for example in examples(found, last_only=last_state):
                            writer.add(example)
                        if chat_writer is not None:
                            chat_writer.write({"messages": found.messages(with_thoughts=thoughts), "id": found.demo_id})
                writer.close()
            counts |= {f"{stem} demonstrations": kept, f"{stem} examples": writer.examples}
            outputs += [*writer.files, *([chat_file] if chats else [])]
    odd.warn()
    if not sum(counts.values()):
        raise DataError("no demonstration is accepted; --all also takes the others, `atropos data validate` tells why")
    settings = {"format": file_format, "all": everything, "last_state": last_state, "channels": list(CHANNELS)}
    catalog = write_catalog(target, rollouts, outputs, counts=counts, settings=settings)
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + f": {catalog}")


def write_catalog(
    folder: Path, inputs: list[str], outputs: Iterable[Path], *, counts: Mapping[str, int], settings: Mapping[str, Json]
) -> Path:
    """Write `catalog.json`: what was made from what, by which version, with sizes and hashes."""
    said = {
        "version": __version__,
        "created_at": time.time(),
        "settings": dict(settings),
        "counts": dict(counts),
        "inputs": [_fingerprint(path) for path in find_rollout_files(inputs, warns=False)],
        "outputs": [_fingerprint(path) for path in outputs],
    }
    write_text_atomic(folder / "catalog.json", json.dumps(said, indent=1))
    return folder / "catalog.json"


def _fingerprint(path: Path) -> JsonObject:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}
