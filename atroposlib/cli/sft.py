"""`atropos-sft-gen`: a supervised fine-tuning set from rollout files, or live from a running API."""

from typing import Annotated

import typer

from atroposlib.cli.boundary import App, reading, run
from atroposlib.data.collect import Collection, is_live_call
from atroposlib.data.formats import Format
from atroposlib.data.policy import load_policy, simple_policy
from atroposlib.data.report import ExportReport
from atroposlib.data.rollout_files import expand_input
from atroposlib.data.sft import SftOptions, collect_sft, export_sft
from atroposlib.errors import ConfigError

app = App()

MOST_SEED = 2**63 - 1
OUTPUT_HELP = "Output .jsonl, .jsonl.zst or .parquet. Default: {0}.jsonl in the folder, NAME.{0}.jsonl by the file."


@app.command()
def generate(
    rollouts: Annotated[
        list[str],
        typer.Argument(help="Rollout files, folders (a run's too) or patterns; or one new file to collect into, live."),
    ],
    output: Annotated[str | None, typer.Option(help=OUTPUT_HELP.format("sft"))] = None,
    format: Annotated[
        Format | None,
        typer.Option(help="Default: prompt-completion; live as upstream's: prefix with --tokenizer, else messages."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, .gguf, embedded model or hub name.")] = None,
    policy: Annotated[str | None, typer.Option(help="YAML of selection steps; replaces the selection options.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Lowest score kept. Default: above 0.")] = None,
    allow_negative_scores: Annotated[bool, typer.Option(help="Keep scores of 0 and below.")] = False,
    save_top_n_per_group: Annotated[int | None, typer.Option(min=1, help="Best n; default all, live 3.")] = None,
    minimum_score_diff_max_min: Annotated[
        float, typer.Option(help="Above 0: keep responses better than their group's worst by more than this.")
    ] = 0.0,
    num_seqs_to_save: Annotated[int | None, typer.Option(min=1, help="Most responses; default all, live 100.")] = None,
    per_turn: Annotated[
        bool, typer.Option(help="messages, sharegpt: a row for each generated turn, which ends with it.")
    ] = False,
    pack: Annotated[int | None, typer.Option(min=1, help="tokens only: fill rows of up to this many tokens.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, help="Of choices by chance; default 0, or the policy's.")
    ] = None,
    save_messages: Annotated[bool, typer.Option(help="Same as --format messages.")] = False,
    append_to_previous: Annotated[bool, typer.Option(help="Add to an existing output.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output.")] = False,
    strict: Annotated[bool, typer.Option(help="Stop at the first odd row instead of setting it aside.")] = False,
    api_url: Annotated[str, typer.Option(help="Live: the trajectory API.")] = "http://localhost:8000",
    group_size: Annotated[int, typer.Option(min=1, help="Live: responses per group.")] = 2,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Live: groups per batch.")] = 64,
    max_token_len: Annotated[int, typer.Option(min=1, help="Live: longest sequence registered.")] = 2048,
    take_over: Annotated[bool, typer.Option(help="Live: also where another trainer has registered.")] = False,
) -> None:
    """Turn scored rollouts into a supervised fine-tuning set.

    Without other options, every response with a score above 0 is kept, as a row for each turn that the model
    generated: its prompt, and the completion that trainers take loss on.

    Examples:
      atropos-sft-gen output.jsonl                                       (writes output.sft.jsonl)
      atropos-sft-gen runs/main/ --output sft.jsonl
      atropos-sft-gen 'runs/main/rollouts/*.jsonl' --output sft.jsonl --min-score 1 --save-top-n-per-group 2
      atropos-sft-gen runs/main/ --tokenizer ./tokenizer --format tokens --pack 16384 --output sft.parquet
      atropos-sft-gen runs/main/ --policy strict.yaml --format sharegpt --output sft.jsonl
      atropos-sft-gen new.jsonl --tokenizer ./tokenizer --api-url http://localhost:8000     (live)
    """
    is_live = is_live_call(rollouts, output, append=append_to_previous)
    chosen = _format(format, save_messages, tokenizer, is_live=is_live)
    selection = simple_policy(
        above=None if allow_negative_scores else 0.0,
        min_score=min_score,
        min_gap=minimum_score_diff_max_min,
        top_n=save_top_n_per_group or (3 if is_live else None),
        target=None if is_live else num_seqs_to_save,
        seed=seed or 0,
    )
    if policy:
        if min_score is not None or allow_negative_scores or save_top_n_per_group or minimum_score_diff_max_min:
            raise ConfigError("--policy replaces the selection options; write them as steps of the policy file")
        selection = load_policy(policy, seed=seed, target=None if is_live else num_seqs_to_save)
    options = SftOptions(
        format=chosen,
        tokenizer=tokenizer,
        per_turn=per_turn,
        pack=pack,
        append=append_to_previous,
        overwrite=overwrite,
        strict=strict,
    )
    if is_live:
        plan = Collection(
            api_url=api_url,
            batch_size=group_size * tasks_per_step,
            max_token_len=max_token_len,
            target=num_seqs_to_save or 100,
            name="sft_gen",
            take_over=take_over,
        )
        print_report(collect_sft(rollouts[0], selection, options, plan))
        return
    output = output or default_output(rollouts[0], "sft")
    with reading(rollouts, passes=2) as advance:
        report = export_sft(rollouts, output, selection, options, advance)
    print_report(report)


def print_report(report: ExportReport, unit: str = "records") -> None:
    """The steps, the counts and the output, on stdout."""
    print(f"{report.responses} responses in {report.groups} groups")
    for step in report.steps:
        print(f"  {step.step:<16} kept {step.kept}, dropped {step.dropped}")
    for task, count in report.tasks.items():
        print(f"  task {task or '(none)'}: {count}")
    if report.contamination:
        listed = f"{report.output}.contamination.jsonl"
        print(f"  shared with evaluation sets: {len(report.contamination)}, listed in {listed}")
    if report.rerendered:
        print(f"  token ids made from messages, as none were recorded: {report.rerendered}")
    copies = f"{report.copies} of them copies of an earlier one"
    unit = unit.removesuffix("s") if report.records == 1 else unit
    print(f"{report.records} {unit} ({report.format}), {copies}: {report.output}")


def default_output(rollouts: str, kind: str) -> str:
    """Where the dataset of a folder (in it) or of one file (next to it) goes.

    >>> default_output("rollouts/output.jsonl.zst", "sft")
    'rollouts/output.sft.jsonl'
    """
    path = expand_input(rollouts)
    if path.is_dir():
        return str(path / f"{kind}.jsonl")
    stem = path.name.removesuffix(".zst").removesuffix(".gz").removesuffix(".jsonl")
    return str(path.with_name(f"{stem}.{kind}.jsonl"))


def _format(given: Format | None, save_messages: bool, tokenizer: str | None, *, is_live: bool) -> Format:
    if save_messages and given not in (None, "messages"):
        raise ConfigError(f"--save-messages means --format messages, but --format {given} was given; leave one out")
    if given or save_messages:
        return given or "messages"
    if is_live:
        return "prefix" if tokenizer else "messages"
    return "prompt-completion"


def main() -> None:
    run(app, "atropos-sft-gen")


if __name__ == "__main__":
    main()
