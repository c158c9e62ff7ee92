"""`atropos-dpo-gen`: preference pairs from rollout files, or live from a running API."""

from typing import Annotated

import typer

from atroposlib.cli.boundary import App, reading, run
from atroposlib.cli.sft import MOST_SEED, OUTPUT_HELP, default_output, print_report
from atroposlib.data.collect import Collection, is_live_call
from atroposlib.data.dpo import DpoFormat, DpoOptions, Negatives, PairRules, collect_dpo, export_dpo
from atroposlib.data.policy import SelectionPolicy, load_policy
from atroposlib.errors import ConfigError

app = App()

BATCH_GROUPS = 8


@app.command()
def generate(
    rollouts: Annotated[
        list[str],
        typer.Argument(help="Rollout files, folders (a run's too) or patterns; or one new file to collect into, live."),
    ],
    output: Annotated[str | None, typer.Option(help=OUTPUT_HELP.format("dpo"))] = None,
    format: Annotated[
        DpoFormat | None, typer.Option(help="Default: trl; live as upstream's: prefix with --tokenizer, else trl.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, .gguf, embedded model or hub name.")] = None,
    policy: Annotated[str | None, typer.Option(help="YAML of steps: which responses may be used at all.")] = None,
    save_n_pairs_per_group: Annotated[int, typer.Option(min=1, help="Most pairs of a problem.")] = 3,
    minimum_score_diff_max_min: Annotated[float, typer.Option(min=0, help="The better scores higher by more.")] = 0.5,
    allow_negative_scores: Annotated[bool, typer.Option(help="The better may score 0 or below.")] = False,
    negatives: Annotated[
        Negatives, typer.Option(help="near_length takes hard ones: wrong, alike in length.")
    ] = "worst",
    max_length_ratio: Annotated[float | None, typer.Option(min=1, help="Longer over shorter answer, at most.")] = None,
    num_seqs_to_save: Annotated[int | None, typer.Option(min=1, help="Most pairs; default all, live 100.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, help="Of choices by chance; default 0, or the policy's.")
    ] = None,
    save_messages: Annotated[bool, typer.Option(help="Same as --format messages.")] = False,
    append_to_previous: Annotated[bool, typer.Option(help="Add to an existing output.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output.")] = False,
    strict: Annotated[bool, typer.Option(help="Stop at the first odd row instead of setting it aside.")] = False,
    api_url: Annotated[str, typer.Option(help="Live: the trajectory API.")] = "http://localhost:8000",
    group_size: Annotated[int, typer.Option(min=1, help="Live: responses per group.")] = 2,
    max_token_len: Annotated[int, typer.Option(min=1, help="Live: longest sequence registered.")] = 2048,
    take_over: Annotated[bool, typer.Option(help="Live: also where another trainer has registered.")] = False,
) -> None:
    """Turn scored rollouts into preference pairs.

    Pairs are of one prompt, best against worst; a group with equal scores gives none. The prompt is everything before
    the first turn that the model generated, the two sides are what it generated.

    Examples:
      atropos-dpo-gen output.jsonl                                       (writes output.dpo.jsonl)
      atropos-dpo-gen runs/main/ --output dpo.jsonl
      atropos-dpo-gen runs/main/ --output dpo.jsonl --negatives near_length --max-length-ratio 1.5
      atropos-dpo-gen runs/main/ --tokenizer ./tokenizer --format tokens --output dpo.parquet
      atropos-dpo-gen new.jsonl --save-messages --api-url http://localhost:8000     (live)
    """
    if save_messages and format not in (None, "messages"):
        raise ConfigError(f"--save-messages means --format messages, but --format {format} was given; leave one out")
    is_live = is_live_call(rollouts, output, append=append_to_previous)
    rules = PairRules(
        max_pairs=save_n_pairs_per_group,
        min_gap=minimum_score_diff_max_min,
        above=None if allow_negative_scores else 0.0,
        negatives=negatives,
        max_length_ratio=max_length_ratio,
    )
    options = DpoOptions(
        format="messages" if save_messages else format or ("prefix" if tokenizer and is_live else "trl"),
        tokenizer=tokenizer,
        target=num_seqs_to_save,
        append=append_to_previous,
        overwrite=overwrite,
        strict=strict,
    )
    selection = load_policy(policy, seed=seed) if policy else SelectionPolicy(seed=seed or 0)
    if is_live:
        plan = Collection(
            api_url=api_url,
            batch_size=group_size * BATCH_GROUPS,
            max_token_len=max_token_len,
            target=num_seqs_to_save or 100,
            name="dpo_gen",
            take_over=take_over,
        )
        print_report(collect_dpo(rollouts[0], rules, options, plan, selection), "pairs")
        return
    output = output or default_output(rollouts[0], "dpo")
    with reading(rollouts, passes=2) as advance:
        report = export_dpo(rollouts, output, rules, options, selection, advance)
    print_report(report, "pairs")


def main() -> None:
    run(app, "atropos-dpo-gen")


if __name__ == "__main__":
    main()
