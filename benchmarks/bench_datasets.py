"""Measures this package's dataset code on generated rollouts: `python -m benchmarks.bench_datasets --megabytes 1000`.

Every number is per CPU-second of one process (children included), in one sitting, on one file: ratios are what counts.
`datasets` is measured when it is installed. The file lies in the system's temporary folder and is removed.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

PROMPT_TOKENS, LONGEST = 200, 3_000
_WORDS = ("the", "sum", "of", "two", "digits", "is", "carried", "so", "we", "write", "it", "down", "and", "check")


def write_rollouts(path: Path, megabytes: int, *, with_ids: bool = True) -> None:
    """Groups of 16 responses of 200 to 3,000 tokens, about 40% accepted."""
    rng = random.Random(0)
    with path.open("wb") as stream:
        number = 0
        while stream.tell() < megabytes * 1_000_000:
            stream.write(orjson.dumps(_group(rng, number, with_ids)) + b"\n")
            number += 1


def _group(rng: random.Random, number: int, with_ids: bool) -> dict[str, Any]:
    prompt = [rng.randrange(50_000) for _ in range(PROMPT_TOKENS)]
    answers = [[rng.randrange(50_000) for _ in range(rng.randrange(200, LONGEST))] for _ in range(16)]
    texts = [" ".join(rng.choice(_WORDS) for _ in answer) for answer in answers]
    ids = {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * PROMPT_TOKENS + answer for answer in answers],
        "inference_logprobs": [[1.0] * PROMPT_TOKENS + [-rng.random() for _ in answer] for answer in answers],
    }
    return {
        **(ids if with_ids else {"tokens": [], "masks": []}),
        "scores": [float(rng.random() < 0.4) for _ in answers],
        "messages": [[{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": t}] for t in texts],
        "group_id": f"g{number}",
        "item_key": str(number),
        "task": f"task{number % 5}",
        "finish_reasons": ["stop"] * 16,
    }


def run_case(case: str, path: Path, tokenizer: str | None) -> None:
    """One measurement in this process; prints a JSON line. `<case>-again` measures the second of two runs."""
    out = path.parent / f"out-{case}.jsonl"
    name = case.removesuffix("-again")
    if name != case:
        _CASES[name](path, out, tokenizer)
        out.unlink()
    before = time.process_time() + _children_s()
    work = _CASES[name](path, out, tokenizer)
    spent = time.process_time() + _children_s() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"case": case, "cpu_s": spent, "mb_per_cpu_s": work / 1e6 / spent, "rss_mb": peak}))


def _orjson(path: Path, out: Path, tokenizer: str | None) -> int:
    with path.open("rb") as stream, out.open("wb") as target:
        for line in stream:
            group = orjson.loads(line)
            for messages, score in zip(group["messages"], group["scores"], strict=True):
                if score > 0:
                    target.write(orjson.dumps({"messages": messages, "score": score}) + b"\n")
    return path.stat().st_size


def _datasets(path: Path, out: Path, tokenizer: str | None) -> int:
    import datasets  # type: ignore[import-not-found]

    def choose(batch: dict[str, list]) -> dict[str, list]:
        kept = [
            (messages, score)
            for row, scores in zip(batch["messages"], batch["scores"], strict=True)
            for messages, score in zip(row, scores, strict=True)
            if score > 0
        ]
        return {"messages": [pair[0] for pair in kept], "score": [pair[1] for pair in kept]}

    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))
    chosen = loaded.map(
        choose, batched=True, batch_size=16, remove_columns=loaded.column_names, load_from_cache_file=False
    )
    chosen.to_json(str(out))
    return path.stat().st_size


def _export(path: Path, out: Path, tokenizer: str | None, format: str) -> int:
    from atroposlib.data.sft import SftOptions, export_sft

    options = SftOptions.model_validate({"format": format, "tokenizer": tokenizer})
    export_sft(path, out, options=options)
    return path.stat().st_size


def _timed_texts(name: str, path: Path, encode: Callable[[list[str]], object]) -> int:
    """Give the accepted responses of each group to `encode`, print its own speed; returns the bytes of text."""
    size, spent = 0, 0.0
    with path.open("rb") as stream:
        for line in stream:
            group = orjson.loads(line)
            texts = [m[-1]["content"] for m, s in zip(group["messages"], group["scores"], strict=True) if s > 0]
            started = time.process_time()
            encode(texts)
            spent += time.process_time() - started
            size += sum(map(len, texts))
    print(json.dumps({"case": f"{name} only", "mb_per_cpu_s": size / 1e6 / spent}))
    return size


def _encode_batch(path: Path, out: Path, tokenizer: str | None) -> int:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(Path(tokenizer or "") / "tokenizer.json"))
    return _timed_texts("encode_batch", path, lambda texts: backend.encode_batch(texts, add_special_tokens=False))


def _rerender(path: Path, out: Path, tokenizer: str | None) -> int:
    from atroposlib.data.templates import TemplateRenderer
    from atroposlib.data.tokenizers import load_tokenizer

    renderer = TemplateRenderer(load_tokenizer(tokenizer or ""))
    question = {"role": "user", "content": "q"}

    def encode(texts: list[str]) -> object:
        chats = [[question, {"role": "assistant", "content": text}] for text in texts]
        return renderer.encode([renderer.segments(chat) for chat in chats])

    return _timed_texts("rerender", path, encode)


_CASES = {
    "orjson": _orjson,
    "datasets": _datasets,
    "select": lambda path, out, tokenizer: _export(path, out, None, "messages"),
    "tokens": lambda path, out, tokenizer: _export(path, out, None, "tokens"),
    "encode_batch": _encode_batch,
    "rerender": _rerender,
}
_NAMES = [*_CASES, "select-again", "tokens-again"]


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Generate, run each case in a process of its own, remove everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--tokenizer", help="Local folder with a chat template, for encode_batch and rerender.")
    parser.add_argument("--cases", nargs="+", choices=_NAMES, default=_NAMES)
    parser.add_argument("--one", choices=_NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_case(options.one, options.file, options.tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        write_rollouts(path, options.megabytes)
        for case in options.cases:
            for index in Path(folder).glob(".*.idx"):  # made by the case before; a first reading has none
                index.unlink()
            if case in ("encode_batch", "rerender") and not options.tokenizer:
                continue
            command = [sys.executable, "-m", "benchmarks.bench_datasets", "--one", case, "--file", str(path)]
            command += ["--tokenizer", options.tokenizer] if options.tokenizer else []
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            print(
                done.stdout.strip() if done.returncode == 0 else f"{case}: {done.stderr.strip().splitlines()[-1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
