"""`atropos data`: check, count, compare, split, merge, describe and show rollout files."""

import contextlib
import importlib
import json
from collections import Counter
from dataclasses import asdict
from types import ModuleType
from typing import Annotated, Literal

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from atroposlib.cli.boundary import App, reading, run
from atroposlib.data.chats import messages_of
from atroposlib.data.output import check_output, refuse_inputs, write_whole
from atroposlib.data.policy import load_policy, select
from atroposlib.data.report import dataset_card, require_groups
from atroposlib.data.rollout_files import find_rollout_files, parse_line, read_lines
from atroposlib.data.set_aside import listed
from atroposlib.data.split_merge import merge_rollouts, split_rollouts
from atroposlib.data.stats import Stats, TaskStats, describe, stats_page
from atroposlib.data.table import open_table, read_group
from atroposlib.data.tokenizers import load_tokenizer, padded_vocabulary
from atroposlib.data.validate import Validation
from atroposlib.errors import DataError, RowError
from atroposlib.paths import expand_path

app = App("Check, count, compare, split, merge, describe and show rollout files.")

Rollouts = Annotated[list[str], typer.Argument(help="Rollout files, folders (a run's too) or patterns.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first odd row instead of setting it aside.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")]


@app.command()
def validate(
    rollouts: Rollouts,
    tokenizer: Annotated[str | None, typer.Option(help="Also check that ids are in its vocabulary.")] = None,
    max_shown: Annotated[int, typer.Option(min=1, help="Problems printed; all are counted.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what was read, and what is wrong.")] = False,
    html: Annotated[str | None, typer.Option(help="Of demonstrations: also write a page with plots.")] = None,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Check every line against every invariant; exit code 1 when something is damaged, or nothing is there.

    Damage is what datasets leave out; notes are legal, but worth knowing. Demonstrations are also counted by level, and
    a mean accuracy of 0.80 or less is exit code 1.

    Examples:
      atropos data validate runs/main/
      atropos data validate 'runs/main/rollouts/*.jsonl' --tokenizer ./tokenizer
    """
    if causal := _demonstrations(rollouts):
        causal.validate(rollouts, max_shown=max_shown, as_json=as_json, html=html, overwrite=overwrite, strict=strict)
        return
    found = Validation(
        vocabulary_size=len(load_tokenizer(tokenizer)) if tokenizer else None,
        padded_size=padded_vocabulary(tokenizer) if tokenizer else None,
    )
    with reading(rollouts) as advance:
        for number, problem in enumerate(found.problems(rollouts, advance), 1):
            if number <= max_shown and not as_json:
                print(f"{'damage' if problem.is_damage else 'note'}: {problem.where}: {problem.text}")
            if strict and problem.is_damage:
                break
    if as_json:
        print(orjson.dumps(found.as_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        _print_validation(found, max_shown)
    if found.damaged or not found.groups:
        raise typer.Exit(1)


@app.command()
def stats(
    rollouts: Rollouts,
    accept_score: Annotated[float, typer.Option(help="A response is accepted when its score is above this.")] = 0.0,
    policy: Annotated[str | None, typer.Option(help="Also show what each step of this policy keeps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[str | None, typer.Option(help="Also write a self-contained page with plots.")] = None,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Count problems, responses, scores, lengths, pass rates, retention and failures.

    Examples:
      atropos data stats runs/main/
      atropos data stats runs/main/ --json | jq .total
      atropos data stats runs/main/ --policy strict.yaml --html stats.html
    """
    page = check_output(html, what="--html", overwrite=overwrite) if html else None
    with reading(rollouts) as advance:
        table = open_table(rollouts, advance, strict=strict)
    refuse_inputs([page] if page else [], table.files, what="--html")
    require_groups(table)
    retention = select(table, load_policy(policy)).steps if policy else None
    found = describe(table, accept_score=accept_score, retention=retention)
    if page:
        write_whole(page, stats_page(found).encode())
    if as_json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        _print_stats(found)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A policy file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another policy file.")],
    rollouts: Rollouts,
    examples: Annotated[int, typer.Option(min=0, help="Responses shown that only one keeps.")] = 3,
    strict: Strict = False,
) -> None:
    """Show what two policies keep of the same rollouts.

    Examples:
      atropos data diff loose.yaml strict.yaml runs/main/
    """
    with reading(rollouts) as advance:
        table = open_table(rollouts, advance, strict=strict)
    require_groups(table)
    a, b = (select(table, load_policy(policy)).keep for policy in (first, second))
    for label, rows in (("both", a & b), (f"only {first}", a & ~b), (f"only {second}", b & ~a), ("neither", ~(a | b))):
        tasks = Counter(table.column("task")[rows].tolist())
        by_task = ", ".join(f"{table.tasks[code] or '(none)'} {count}" for code, count in sorted(tasks.items()))
        print(f"{label}: {int(rows.sum())}" + (f" ({by_task})" if by_task else ""))
        for row in np.flatnonzero(rows)[:examples].tolist() if label.startswith("only") else []:
            print(f"  {table.where(row)} score {table.responses['score'][row]:g}")


@app.command()
def split(
    rollouts: Rollouts,
    output_dir: Annotated[str, typer.Option(help="Gets train.jsonl, val.jsonl and test.jsonl.")],
    shares: Annotated[str, typer.Option(help="Of problems: train, val, test.")] = "0.7,0.2,0.1",
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Split by problem, stratified by task and difficulty; no problem is in two splits.

    Demonstrations are split by causal model, stratified by level, graph and accuracy.

    Examples:
      atropos data split runs/main/ --output-dir splits
      atropos data split runs/main/ --output-dir splits --shares 0.9,0,0.1 --seed 7
    """
    try:
        parts = [float(part) for part in shares.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{shares!r} is not three numbers with commas", param_hint="--shares") from None
    causal = _demonstrations(rollouts)
    with reading(rollouts, passes=2) as advance:
        counts = (causal.split if causal else split_rollouts)(
            *(rollouts, output_dir), shares=parts, seed=seed, overwrite=overwrite, strict=strict, advance=advance
        )
    print(", ".join(f"{name}: {count} groups" for name, count in counts.items()))


@app.command()
def prepare(
    rollouts: Rollouts,
    output_dir: Annotated[str, typer.Option(help="Gets the tensors, a catalog and chats.")],
    file_format: Annotated[Literal["npz", "hdf5"], typer.Option("--format", help="hdf5 needs h5py.")] = "npz",
    everything: Annotated[bool, typer.Option("--all", help="Also those that are not accepted.")] = False,
    last_state: Annotated[bool, typer.Option("--last-state", help="One example a demonstration, not T + 1.")] = False,
    chats: Annotated[bool, typer.Option("--chats", help="Also write chats for SFT, one a line.")] = False,
    thoughts: Annotated[
        bool, typer.Option("--thoughts", help="Chats begin actions with the recorded numbers.")
    ] = False,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Turn demonstrations of the causal expert into tensors [N, d, 3]; rollouts become datasets with `atropos sft`.

    Examples:
      atropos data prepare splits/ --output-dir tensors
      atropos data prepare demos/ --output-dir tensors --chats --thoughts
    """
    causal = _demonstrations(rollouts)
    if causal is None:
        raise DataError(f"{', '.join(rollouts)}: these are no demonstrations; `atropos sft` makes datasets of rollouts")
    causal.prepare(
        *(rollouts, output_dir),
        file_format=file_format,
        everything=everything,
        last_state=last_state,
        chats=chats or thoughts,
        thoughts=thoughts,
        overwrite=overwrite,
        strict=strict,
    )


@app.command()
def merge(
    rollouts: Rollouts,
    output: Annotated[str, typer.Option(help="The merged rollout file, .jsonl or .jsonl.zst.")],
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Merge partial runs into one file without duplicates.

    Examples:
      atropos data merge runs/first/ runs/second/ --output all.jsonl.zst
    """
    with reading(rollouts) as advance:
        merged = merge_rollouts(rollouts, output, overwrite=overwrite, strict=strict, advance=advance)
    print(f"{merged.groups} groups of {merged.files} files, {merged.duplicates} duplicates left out: {merged.output}")


@app.command()
def card(
    dataset: Annotated[str, typer.Argument(help="A dataset made by atropos-sft-gen or atropos-dpo-gen.")],
    output: Annotated[str | None, typer.Option(help="Default: printed.")] = None,
    name: Annotated[str | None, typer.Option(help="Title; default: the file's name.")] = None,
    license_id: Annotated[str, typer.Option("--license", help="Hugging Face licence id of the data.")] = "other",
    overwrite: Overwrite = False,
) -> None:
    """Write a dataset card with front matter, selection, sampling and file hashes.

    Examples:
      atropos data card sft.jsonl --output README.md --license mit
    """
    target = check_output(output, overwrite=overwrite) if output else None
    refuse_inputs([target] if target else [], [expand_path(dataset, what="the dataset")])
    text = dataset_card(dataset, name=name, license_id=license_id)
    if target is None:
        print(text)
        return
    write_whole(target, text.encode())
    print(target)


@app.command()
def show(
    rollouts: Rollouts,
    number: Annotated[int, typer.Option("--number", "-n", min=0, help="Response, counted from 0 over all files.")] = 0,
    group: Annotated[bool, typer.Option("--group", help="All responses of its group.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole recorded line.")] = False,
    strict: Strict = False,
) -> None:
    """Show one response at once, also of a large set (keeps an index next to each file).

    Examples:
      atropos data show runs/main/ -n 123456
      atropos data show runs/main/ -n 123456 --json | jq .sampling
    """
    table = open_table(rollouts, strict=strict)
    require_groups(table)
    if number >= len(table.responses):
        raise DataError(f"there is no response {number}; these files hold {len(table.responses)}, counted from 0")
    response = table.responses[number]
    line, found = read_group(table, int(response["group"]))
    if as_json:
        print(line.data.decode(errors="replace").rstrip("\n"))
        return
    print(f"{line.where}  task {found.task or '(none)'}  item {found.item_key}  group {found.group_id}")
    for index in range(len(found.scores)) if group else [int(response["index"])]:
        lengths = found.lengths(index)
        tokens = f"{lengths[1]} of {lengths[0]} tokens trained" if lengths else "no token ids recorded"
        print(f"\n=== [{index}] score {found.scores[index]:g}, ended by {found.finish_reason(index)}, {tokens}")
        for message in messages_of(found, index):
            content = message.get("content")
            print(f"--- {message.get('role')}\n{content if isinstance(content, str) else json.dumps(content)}")
            for key in [key for key in message if key not in ("role", "content")]:
                print(f"[{key}] {json.dumps(message[key], ensure_ascii=False)}")


def _demonstrations(rollouts: list[str]) -> ModuleType | None:
    """Return the module for demonstrations of the causal expert when that is what the first line is, else None."""
    for path in find_rollout_files(rollouts, warns=False):
        with contextlib.suppress(RowError):
            first = next(iter(read_lines(path)), None)
            if first is not None:
                is_one = b'"demonstration":' in first.data and "demonstration" in parse_line(first)
                return importlib.import_module("atroposlib.environments.causal.datasets") if is_one else None
    return None


def _print_validation(found: Validation, max_shown: int) -> None:
    unseen = len(found.damaged) + len(found.notes) - max_shown
    if unseen > 0:
        print(f"... and {unseen} more; --max-shown N prints N of them")
    print(
        f"read: {found.files} files, {found.lines} lines, {found.groups} groups, {found.responses} responses, "
        f"{found.without_assistant} of them without an assistant turn"
    )
    for name, odd in (("damaged", found.damaged), ("notes", found.notes)):
        print(f"{name}: {len(odd)}{f' ({listed(odd.counts)})' if odd else ''}")
    if not found.groups:
        print("there is no group in these files")


def _print_stats(found: Stats) -> None:
    console = Console(width=140)
    table = TextTable(box=None, pad_edge=False)
    columns = [
        *("task", "problems", "responses", "accepted", "score_mean"),
        *("unsolved", "mixed", "solved_always", "completion_p50", "completion_p95"),
    ]
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name == "task" else "right", no_wrap=True)
    for task in (*found.tasks, found.total):
        table.add_row(*(Text(_cell(task, name)) for name in columns))
    console.print(table)
    for title, counts in (("ended by", found.finish_reasons), ("failed tries", found.failures)):
        if counts:
            console.print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()), markup=False)
    if found.set_aside:
        left_out = ", ".join(f"{each['reason']}: {each['count']}" for each in found.set_aside)
        console.print(f"left out of datasets: {left_out}", markup=False)
    for step in found.retention:
        console.print(f"policy step {step.step}: kept {step.kept}, dropped {step.dropped}", markup=False)


def _cell(task: TaskStats, name: str) -> str:
    value = asdict(task)[name]
    if isinstance(value, float):
        return f"{value:.3g}" if name == "score_mean" else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Entry of `atropos data`."""
    run(app, "atropos data")


if __name__ == "__main__":
    main()
