r"""Compare our evaluations with lm-eval's on the same rows, prompts and engine, item by item.

    atropos engine --model smollm2-135m --port 9004 --context 2048 &
    python -m benchmarks.bench_lm_eval http://127.0.0.1:9004 VENV/bin/python

VENV is an environment of its own with `pip install 'lm-eval[api]==0.4.13'`. Rows are made, with the columns of
the sets. Prompts of generation are ours, and lm-eval reads replies with filters as of its tasks, and their metric; the
tasks that compare choices are lm-eval's own files.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from atroposlib.environments.choices import LETTERS, listed
from atroposlib.environments.eval_environments.kinds import Choice, Math
from atroposlib.environments.rows import write_rows
from atroposlib.utils.eval_statistics import standard_error
from atroposlib_engine.models import resolve_model

MODEL, SHOTS, TOKENS = "smollm2-135m", 4, 24
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "eggs", "kites", "marbles", "pens", "shells")

Row = dict[str, Any]


class Scores(NamedTuple):
    """One metric of one side: the mean, its standard error and the score of each item by its question."""

    mean: float
    error: float
    by_item: Mapping[int, float]  # by the number of the row
    said: Mapping[int, Any]  # the reply, or the log-likelihoods of the choices


def word_problems(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of GSM8K."""
    while True:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        has, more = rng.randint(2, 20), rng.randint(1, 3)
        is_sum = rng.random() < 0.5
        what, end = ("buys", has + more) if is_sum else ("loses", has - more)
        if end > 0:
            question = f"{name} has {has} {thing} and {what} {more}. How many {thing} does {name} have now?"
            yield {"question": question, "answer": f"{has} {'+' if is_sum else '-'} {more} = {end}\n#### {end}"}


def questions(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of MMLU."""
    while True:
        numbers = rng.sample(range(10, 99), 4)
        kind = rng.choice(("largest", "smallest"))
        right = max(numbers) if kind == "largest" else min(numbers)
        question = f"Which of these numbers is the {kind}: {', '.join(map(str, sorted(numbers)))}?"
        yield {"question": question, "subject": kind, "choices": [*map(str, numbers)], "answer": numbers.index(right)}


def sentences(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of ARC, whose choices differ in length."""
    endings = {
        "fish": "swims in the water with its fins",
        "bird": "flies",
        "dog": "barks at strangers",
        "clock": "shows what time it is",
        "knife": "cuts bread",
        "lamp": "gives light when it is dark",
        "train": "runs on rails",
        "pen": "writes with ink on paper",
    }
    while True:
        subject, place, hour = rng.choice([*endings]), rng.choice(THINGS), rng.randint(1, 12)
        texts = [endings[subject], *rng.sample([text for name, text in endings.items() if name != subject], 3)]
        order = rng.sample(range(4), 4)
        choices = {"text": [texts[i] for i in order], "label": [*LETTERS[:4]]}
        question = f"At {hour} o'clock there is a {subject} next to the {place}. What does a {subject} do?"
        yield {"question": question, "choices": choices, "answerKey": LETTERS[order.index(0)]}


def endings(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of HellaSwag, marks of WikiHow among them."""
    for row in sentences(rng):
        place, texts = rng.choice(THINGS), row["choices"]["text"]
        first = f"[header] How to look at {place} [title] Look for it."
        ends = [f"it {text}. [step] {rng.randint(1, 9)} people watch." for text in texts]
        ctx = {"ctx_a": first, "ctx_b": "then " + row["question"].partition(".")[0], "activity_label": "Looking"}
        yield {**ctx, "ctx": "", "endings": ends, "label": str(LETTERS.index(row["answerKey"]))}


def blanks(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of Winogrande: what follows the blank is scored."""
    while True:
        first, second = rng.sample(NAMES, 2)
        thing, right = rng.choice(THINGS), rng.choice((1, 2))
        sentence = (
            f"{first} gave the {thing} to {second}, so _ {'has fewer' if right == 1 else 'has more'} {thing} now."
        )
        yield {"sentence": sentence, "option1": first, "option2": second, "answer": str(right)}


def yes_or_no(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of BoolQ."""
    for row in word_problems(rng):
        asked, end = rng.randint(1, 20), int(row["answer"].rpartition(" ")[2])
        about = row["question"].rpartition(". How many")
        question = f"is{about[2].partition('does')[0]}more than {asked}"
        yield {"passage": about[0], "question": question, "answer": end > asked, "label": int(end > asked)}


def goals(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of PIQA."""
    for row in sentences(rng):
        right, wrong = row["choices"]["text"][LETTERS.index(row["answerKey"])], row["choices"]["text"][0]
        if right != wrong:
            label = rng.randint(0, 1)
            yield {
                "goal": row["question"],
                "sol1": (right, wrong)[label],
                "sol2": (wrong, right)[label],
                "label": label,
            }


def stems(rng: random.Random) -> Iterator[Row]:
    """Yield rows with the columns of OpenBookQA."""
    for row in sentences(rng):
        yield {"question_stem": row.pop("question").replace("?", ""), **row}


def rows_of(make: Iterator[Row], count: int) -> list[Row]:
    """Return the first rows that differ."""
    found: dict[str, Row] = {}
    while len(found) < count:
        row = next(make)
        found.setdefault(str(row.get("question") or row), row)
    return list(found.values())


def generation(asked: str, target: str, filters: Mapping[str, Row], ignored: Sequence[str]) -> Row:
    """Return lm-eval's settings of a task that generates; a filter for each way to read a reply."""
    chain = [{"name": name, "filter": [each, {"function": "take_first"}]} for name, each in filters.items()]
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True}
    return {
        "output_type": "generate_until",
        "doc_to_text": asked,
        "doc_to_target": target,
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": TOKENS},
        "filter_list": chain,
        "metric_list": [{**metric, "regexes_to_ignore": list(ignored)}],
    }


def likelihood(context: str, choices: Any, target: str) -> Row:
    """Return lm-eval's settings of a task that compares choices."""
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    texts = {"doc_to_text": context, "doc_to_choice": choices, "doc_to_target": target}
    return {"output_type": "multiple_choice", **texts, "metric_list": metrics}


OF_LM_EVAL = {  # rows and metrics by ours; its file
    "hellaswag": (endings, "hellaswag/hellaswag.yaml", ("acc", "acc_norm")),
    "winogrande": (blanks, "winogrande/default.yaml", ("acc",)),
    "boolq": (yes_or_no, "super_glue/boolq/default.yaml", ("acc",)),
    "piqa": (goals, "piqa/piqa.yaml", ("acc", "acc_norm")),
    "obqa": (stems, "openbookqa/openbookqa.yaml", ("acc", "acc_norm")),
}


def own_tasks(tasks: Path, items: int) -> Iterator[tuple[str, str, list[Row], Row, dict[str, str]]]:
    """Yield what is compared with the files of lm-eval's tasks as they are, but for the rows."""
    for name, (make, file, metrics) in OF_LM_EVAL.items():
        task = {"include": str(tasks / file), "dataset_name": None, "training_split": None, "validation_split": None}
        rows = rows_of(make(random.Random(0)), items + SHOTS)
        yield name, "loglikelihood", rows, task, {f"{metric},none": metric for metric in metrics}


def cases(items: int) -> list[tuple[str, str, list[Row], Row, dict[str, str]]]:
    """Return what is compared: benchmark, scoring, rows, lm-eval's task, and our metric by lm-eval's."""
    rng = random.Random(0)
    sums, numbers, arc = (rows_of(make(rng), items + SHOTS) for make in (word_problems, questions, sentences))
    for row in sums:
        row["asked"] = f"{row['question']}\n\n{Math.ask}"
        row["target"] = f"\\boxed{{{row['answer'].rpartition('#### ')[2]}}}"
    for row in numbers:
        row["asked"] = f"{row['question']}\n\n{listed(row['choices'])}\n\n{Choice.ask}"
        row["target"] = f"The best answer is: {LETTERS[row['answer']]}"
    boxed = {"function": "regex", "regex_pattern": r"\\boxed\{([^}]*)\}", "group_select": -1}
    lettered = {"function": "regex", "regex_pattern": r"answer is:? *\(?([A-D])", "group_select": -1}
    number = {"function": "regex", "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1}
    of_gsm8k = [",", "\\$", "(?s).*boxed\\{", "\\}$", "\\.$"]
    of_mmlu = (
        "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"
    )
    return [
        (
            *("gsm8k", "generate", sums),
            generation("{{asked}}", "{{target}}", {"boxed": boxed, "flexible-extract": number}, of_gsm8k),
            {"exact_match,boxed": "grades", "exact_match,flexible-extract": "grades"},
        ),
        (
            *("mmlu", "generate", numbers),
            generation("{{asked}}", "{{target}}", {"letter": lettered}, ["(?s).*answer is: "]),
            {"exact_match,letter": "grades"},
        ),
        (
            *("mmlu", "loglikelihood", numbers),
            likelihood(of_mmlu, [*LETTERS[:4]], "answer"),
            {"acc,none": "acc", "acc_norm,none": "acc_norm"},
        ),
        (
            *("arc", "loglikelihood", arc),
            likelihood("Question: {{question}}\nAnswer:", "{{choices.text}}", "{{choices.label.index(answerKey)}}"),
            {"acc,none": "acc", "acc_norm,none": "acc_norm"},
        ),
    ]


def ours(url: str, name: str, scoring: str, shots: int, files: Mapping[str, str], folder: Path) -> list[Row]:
    """Evaluate with `atropos eval run`; returns its samples."""
    settings = {"dataset": files["test"], "few_shot_dataset": files["train"], "few_shot": shots, "scoring": scoring}
    settings |= {"system_prompt": "", "max_token_length": TOKENS, "use_wandb": "false", "max_eval_workers": 8}
    settings |= {"tokenizer_name": MODEL, "data_dir_to_save_evals": folder}
    flags = [text for key, value in settings.items() for text in (f"--env.{key}", str(value))]
    server = ["--openai.base_url", f"{url}/v1", "--openai.model_name", MODEL, "--openai.server_type", "sglang"]
    run([sys.executable, "-m", "atroposlib.cli.main", "eval", "run", name, *server, *flags], folder.with_suffix(".log"))
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").split("\n") if line]


def theirs(url: str, python: str, task: Row, folder: Path) -> tuple[Row, list[Row]]:
    """Evaluate with lm-eval; returns its results and its samples."""
    folder.mkdir()
    (folder / "task.yaml").write_text(yaml.safe_dump({"task": "case", **task}))
    is_chat = task.get("output_type") == "generate_until"
    kind, route = ("local-chat-completions", "chat/completions") if is_chat else ("local-completions", "completions")
    model = {"model": MODEL, "base_url": f"{url}/v1/{route}", "num_concurrent": 8, "max_length": 1000}
    if not is_chat:
        model |= {"tokenizer": resolve_model(MODEL).tokenizer_dir, "tokenizer_backend": "huggingface"}
    given = ",".join(f"{key}={value}" for key, value in model.items())
    command = [python, "-m", "lm_eval", "--model", kind, "--model_args", given, "--tasks", "case"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    run(command + (["--apply_chat_template", "--fewshot_as_multiturn"] if is_chat else []), folder / "log")
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text("utf-8").split("\n") if line]
    return json.loads(results.read_text())["results"]["case"], lines


def run(command: Sequence[str], log: Path) -> None:
    """Run a command without the network of the hub; SystemExit with the end of its log when it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(log.parent / "cache"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as to:
        code = subprocess.run(command, stdout=to, stderr=subprocess.STDOUT, env=os.environ | offline).returncode
    if code:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {code}:\n{log.read_text()[-3000:]}")


def our_scores(samples: Sequence[Row], metric: str) -> Scores:
    """Return one metric of our samples, which are in the order of the rows."""
    values = {i: row["grades"][0] if metric == "grades" else row[metric] for i, row in enumerate(samples)}
    said = {i: row.get("loglikelihoods") or row["responses"][0] for i, row in enumerate(samples)}
    scores = [*values.values()]
    return Scores(sum(scores) / len(scores), standard_error(scores), values, said)


def their_scores(results: Row, samples: Sequence[Row], metric: str) -> Scores:
    """Return one metric of lm-eval's results; `metric` is name,filter."""
    name, _, way = metric.partition(",")
    rows = [row for row in samples if row["filter"] == way]
    said = {row["doc_id"]: [float(one[0][0]) for one in row["resps"]] for row in rows if "acc" in row}
    said = said or {row["doc_id"]: row["resps"][0][0] for row in rows}
    by_item = {row["doc_id"]: float(row[name]) for row in rows}
    return Scores(results[metric], results[f"{name}_stderr,{way}"], by_item, said)


def compare(url: str, python: str, folder: Path, only: Sequence[str], items: int) -> None:
    """Print a line for each case and metric; on stderr the items on which the sides differ."""
    print("| benchmark | scoring | metric of lm-eval | lm-eval | ours | items scored alike | what was scored |")
    print("|---|---|---|---|---|---|---|")
    installed = subprocess.run(
        [python, "-c", "import lm_eval, os; print(os.path.dirname(lm_eval.__file__))"],
        check=True,
        stdout=subprocess.PIPE,
    )
    tasks = Path(installed.stdout.decode().strip()) / "tasks"
    for number, (name, scoring, rows, task, metrics) in enumerate([*cases(items), *own_tasks(tasks, items)]):
        if only and f"{name}/{scoring}" not in only:
            continue
        here = folder / f"{number}"
        here.mkdir()
        parts = {"test": rows[SHOTS:], "train": rows[:SHOTS]}
        files = {part: write_rows(here / f"{part}.jsonl", found) for part, found in parts.items()}
        shots = SHOTS if scoring == "generate" else 0
        samples = ours(url, name, scoring, shots, files, here / "ours")
        hub = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        shown = {"fewshot_split": "train", "num_fewshot": shots, "fewshot_config": {"sampler": "first_n"}}
        results, lines = theirs(url, python, {**hub, **shown, **task}, here / "theirs")
        for metric, field in metrics.items():
            left, right = their_scores(results, lines, metric), our_scores(samples, field)
            alike = sum(left.by_item[key] == right.by_item[key] for key in left.by_item)
            asked = f"{same_prompts(samples, lines)} same prompts, " if scoring == "generate" else ""
            print(
                f"| {name} | {scoring} | {metric.removesuffix(',none')} | {left.mean:.4f} ± {left.error:.4f} "
                f"| {right.mean:.4f} ± {right.error:.4f} | {alike} of {len(left.by_item)} "
                f"| {asked}{scored(left, right)} |",
                flush=True,
            )
            for key in left.by_item:
                if left.by_item[key] != right.by_item[key]:
                    print(f"    {left.by_item[key]} {right.by_item[key]} {key!r}: {right.said[key]!r}", file=sys.stderr)


def same_prompts(ours: Sequence[Row], theirs: Sequence[Row]) -> int:
    """Count the items of which both sides sent the same chat."""
    sent = {row["doc_id"]: json.loads(row["arguments"]["gen_args_0"]["arg_0"][0]) for row in theirs}
    return sum(
        [(turn["role"], turn["content"]) for turn in sent[number]]
        == [(turn["role"], turn["content"]) for turn in row["messages"]]
        for number, row in enumerate(ours)
    )


def scored(left: Scores, right: Scores) -> str:
    """Return how far apart log-likelihoods are; or how many replies are the same, and of these scored alike."""
    pairs = [(left.said[key], right.said[key]) for key in left.said]
    if not isinstance(pairs[0][0], str):
        return f"{max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)):.1e} nats apart"
    same = [key for key in left.said if left.said[key].strip() == right.said[key].strip()]
    alike = sum(left.by_item[key] == right.by_item[key] for key in same)
    return f"{len(same)} same replies, {alike} of them scored alike"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_lm_eval", description=__doc__)
    parser.add_argument("url", metavar="URL", help="an embedded engine with smollm2-135m, e.g. http://127.0.0.1:9004")
    parser.add_argument("python", metavar="PYTHON", help="of an environment with lm-eval")
    parser.add_argument("--only", action="append", default=[], help="benchmark/scoring, such as gsm8k/generate")
    parser.add_argument("--items", type=int, default=128, help="rows of each case (default: 128)")
    parser.add_argument("--keep", metavar="FOLDER", help="where rows, logs and results stay")
    given = parser.parse_args(arguments)
    if given.keep:
        compare(given.url, given.python, Path(given.keep), given.only, given.items)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(given.url, given.python, Path(folder), given.only, given.items)


if __name__ == "__main__":
    main()
