"""Runs to look at: tools, thinking, verdicts, failures, two steps, numbers for every token; made up, from a seed."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tests.data.small_tokenizer import write_tokenizer

Encode = Callable[[str], list[int]]
PLACES = ("Bonn", "Lyon", "Turin", "Porto", "Gdańsk", "Graz")
TASKS = ("weather", "sums", "proofs")


def numbers_of(ids: list[int], rng: random.Random) -> tuple[list[float], list[float], list[float]]:
    """For each id the engine's and the trainer's log-probability and an entropy."""
    ours = [-rng.expovariate(2.0) for _ in ids]
    theirs = [value + rng.gauss(0, 0.05) for value in ours]
    return ours, theirs, [min(3.0, rng.expovariate(1.5)) for _ in ids]


def weather_chat(place: str, warm: int, rng: random.Random) -> list[dict]:
    call = {
        "id": f"c{warm}",
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps({"city": place, "unit": "C"})},
    }
    thought = " ".join(rng.choice(("first", "look", "up", "the", "city", "then", "compare")) for _ in range(60))
    return [
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": f"How warm is it in {place}?"},
        {"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"city": place, "celsius": warm})},
        {"role": "assistant", "content": f"It is {warm} degrees in {place}."},
    ]


def sum_chat(a: int, b: int, given: int, rng: random.Random) -> list[dict]:
    steps = "\n".join(f"{a} + {k} = {a + k}" for k in range(1, rng.randint(2, 12)))
    return [
        {"role": "user", "content": f"What is {a} + {b}? Answer in \\boxed{{}}."},
        {"role": "assistant", "content": f"<think>{steps}\nso {given}</think>\nThe sum is \\boxed{{{given}}}."},
    ]


def make_group(item: int, *, size: int, step: int, encode: Encode, seed: int = 0) -> dict:
    rng = random.Random(f"{seed} {item} {step}")
    task = TASKS[item % 2] if item % 5 else "proofs"
    skill = 0.25 + 0.5 * (item % 7) / 7 + 0.1 * step
    chats, scores, verdicts = [], [], []
    for _ in range(size):
        good = rng.random() < skill
        if task == "weather":
            place = PLACES[item % len(PLACES)]
            chats.append(weather_chat(place, 12 if good else rng.randint(13, 30), rng))
        else:
            chats.append(sum_chat(item + 11, 7, item + 18 if good else item + 18 + rng.randint(1, 3), rng))
        scores.append(1.0 if good else (0.5 if rng.random() < 0.2 else 0.0))
        verdicts.append(
            {"verdict": "right" if good else "wrong", "words": f"expected {item + 18}, read from the last answer"}
        )
    asked = [2 if task == "weather" else 1 for _ in chats]
    texts = [
        ("\n".join(str(m["content"]) for m in part) for part in (c[:n], c[n:]))
        for c, n in zip(chats, asked, strict=True)
    ]
    prompts, answers = zip(*([encode(text) for text in pair] for pair in texts), strict=True)
    rows = [(p + a, *numbers_of(p + a, rng)) for p, a in zip(prompts, answers, strict=True)]
    prompts = [len(prompt) for prompt in prompts]

    def masked(values: list, prompt: int, fill: float) -> list:
        return [fill] * prompt + values[prompt:]

    group = {
        "schema_version": 1,
        "env": "sample",
        "run": "main",
        "group_id": f"sample/main/{item}/{step}",
        "item_key": str(item),
        "part": 0,
        "parts": 1,
        "task": task,
        "finish_reasons": ["length" if rng.random() < 0.06 else "stop" for _ in scores],
        "engine": {"model": "sample/model", "weight_version_start": str(step), "weight_version_end": str(step)},
        "sampling": {"temperature": 1.0, "n": size, "max_new_tokens": 512},
        "scores": scores,
        "tokens": [ids for ids, *_ in rows],
        "masks": [masked(ids, p, -100) for (ids, *_), p in zip(rows, prompts, strict=True)],
        "inference_logprobs": [masked(ours, p, 1.0) for (_, ours, *_), p in zip(rows, prompts, strict=True)],
        "trainer_logprobs": [masked(theirs, p, 1.0) for (_, _, theirs, _), p in zip(rows, prompts, strict=True)],
        "entropies": [masked(entropies, p, 0.0) for (*_, entropies), p in zip(rows, prompts, strict=True)],
        "verdicts": verdicts,
        "messages": chats,
    }
    if item % 9 == 4:
        fault = {"index": size, "failure": "verifier", "error": "VerifierFault: the judge gave no verdict in 10 s"}
        group["unscored"] = [fault | {"messages": chats[0]}]
    return group


def write_run(folder: Path, *, items: int = 60, size: int = 8, steps: tuple[int, ...] = (1,), seed: int = 0) -> Path:
    """A folder as `atropos process` leaves it, failures included."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder / "tokenizer")
    (folder / "sample_rollouts_main.config.yaml").write_text(f"env: {{tokenizer_name: {tokenizer}}}\n")
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return encoder.encode(text).ids

    kinds = {"size": size, "encode": encode, "seed": seed}
    groups = [make_group(item, step=step, **kinds) for step in steps for item in range(items)]
    path = folder / "sample_rollouts_main_0001.jsonl"
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    failures = [
        {
            "env": "sample",
            "run": "main",
            "item_key": str(item),
            "task": TASKS[item % 3],
            "class": kind,
            "error": f"{kind}: item {item} failed",
            "try": 1,
            "final": True,
            "at": 1_795_900_000.0 + item,
            "traceback": f"Traceback (most recent call last):\n  File env.py, line {item}, in verify\n{kind}\n",
        }
        for item, kind in enumerate(("verifier", "engine", "verifier", "kill"))
    ]
    (folder / "failures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in failures))
    return path
