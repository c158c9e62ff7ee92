"""Rows of agent programs: the share of rollouts that stay one row to train on, and what forked the others.

    python benchmarks/bench_agent_rows.py openai_agents langgraph smolagents     # those that are installed here
    python benchmarks/bench_agent_rows.py command --command mini -y --exit-immediately -m openai/scripted -t

Each program does 32 sums with two tools. The model is a script: it thinks in every other task, spaces its JSON oddly,
and ends its text in white space, as models do. `command` is a program that writes a file by a tool `bash`. A fork
is named by the first message that came back other than it was.
"""

import argparse
import asyncio
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from atroposlib.envs.agent_env import AgentEnv  # noqa: E402
from atroposlib.envs.base import ServerBaseline  # noqa: E402
from atroposlib.envs.catalog import from_file  # noqa: E402
from atroposlib.envs.server_handling.agents.rows import TRAINED, Row, rows_of  # noqa: E402
from tests.fakes import FakeServer, FakeTokenizer  # noqa: E402

AGENTS = Path(__file__).parents[1] / "atroposlib" / "environments" / "agents"
MODES = [{"api": api, "stream": stream} for api in ("chat", "responses") for stream in (False, True)]
PROGRAMS = {"openai_agents": MODES, "langgraph": MODES, "smolagents": [{}], "command": [{}]}


class Tokenizer(FakeTokenizer):
    """Renders everything that a message holds, and the tools in front."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None, **_):
        turns = [f"<|im_start|>{said['role']}\n{json.dumps(said)}<|im_end|>\n" for said in conversation]
        return f"{json.dumps(tools)}\n{''.join(turns)}" + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def answer(prompt: str) -> str:
    """Multiply, then add, then say the number: by the tool for that where there is one."""
    left, right, rest = map(int, re.search(r"What is (\d+) times (\d+), plus (\d+)", prompt).groups())  # type: ignore
    turn = prompt.count("<|im_start|>assistant") - 1
    thought = f"<think>{left} and {right}, hm.</think>\n" if left % 2 else ""
    if turn < 2:
        name, a, b = ("multiply", left, right) if turn == 0 else ("add", left * right, rest)
        text = f'<tool_call>\n{{"name": "{name}",  "arguments": {{"a":{a}, "b" : {b}}}}}\n</tool_call>'
        return f"{thought}I {name}. \n{text}"
    number = left * right + rest
    if "final_answer" in prompt:
        return f'{thought}<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "{number}"}}}}\n</tool_call>'
    return f"{thought}The number is {number}. \n"


def shell_answer(prompt: str) -> str:
    """Write a number to a file, look, and end, as mini-swe-agent is told to."""
    number = int(re.search(r"Write (\d+) to", prompt)[1])  # type: ignore
    commands = [f"echo {number} > answer.txt", "cat answer.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    command = json.dumps(commands[min(prompt.count("<|im_start|>assistant") - 1, 2)])
    thought = "<think>Hm.</think>\n" if number % 2 else ""
    return f'{thought}I run it. \n<tool_call>\n{{"name": "bash",  "arguments": {{"command":{command}}}}}\n</tool_call>'


def command_settings(command: list[str], tasks: int, folder: Path) -> dict:
    """Run a program on tasks of writing a file."""
    lines = [{"prompt": f"Write {n} to answer.txt", "check": f"grep -q {n} answer.txt"} for n in range(tasks)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    variables = ["MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors", "MSWEA_SILENT_STARTUP=1"]
    return {"command": ["env", *variables, *command], "tasks": str(folder / "tasks.jsonl"), "agent_timeout_s": 120}


def fork_of(row: Row, others: list[Row]) -> str:
    """Say what of a row's conversation is other than in the row that shares most with it."""
    mine = row.messages or []
    pairs = [zip(mine, other.messages or [], strict=False) for other in others]
    shared = [len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
    index = max(range(len(others)), key=lambda each: shared[each])
    theirs, at = others[index].messages or [], shared[index]
    if at >= min(len(mine), len(theirs)):
        return "nothing differs: sampled again"
    told, sent = theirs[at], mine[at]
    if told["role"] != sent["role"]:
        return f"{told['role']} came back as {sent['role']}"
    changed = sorted(key for key in told.keys() | sent.keys() if told.get(key) != sent.get(key))
    return f"{told['role']}: {', '.join(changed)} came back changed"


def measured(name: str, settings: dict, tasks: int) -> str:
    env_cls = from_file(AGENTS / f"{name}_env.py")
    assert issubclass(env_cls, AgentEnv)
    rows: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    differences = 0

    class Watched(env_cls):
        def load_tokenizer(self):
            return Tokenizer()

        async def verify(self, item, run):
            nonlocal differences
            trained = [row for row in rows_of(run.rollout) if row.role in TRAINED]
            rows[len(trained)] += 1
            reasons.update(fork_of(row, trained[:number]) for number, row in enumerate(trained) if number)
            differences += run.rollout.managed.lineage.differences
            return await super().verify(item, run)

    async def all_tasks() -> list[float]:
        given = {"group_size": 1, "use_wandb": False, "ensure_scores_are_not_same": False, **settings}
        env = Watched(env_cls.env_config_cls(**given), ServerBaseline(), False, True)
        env.server.servers = [FakeServer(shell_answer if name == "command" else answer, tokenizer=Tokenizer())]
        try:
            await env.setup()
            groups = [(await env.collect_trajectories(await env.get_item(index)))[0] for index in range(tasks)]
            return [score for group in groups for score in set(group.get("scores", []))]
        finally:
            await env.teardown()

    scores = asyncio.run(all_tasks())
    said = settings.get("api", "") + (", streamed" if settings.get("stream") else "")
    counts = ", ".join(f"{count} x {number}" for number, count in sorted(rows.items()))
    why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()) or "-"
    right = sum(scores) / len(scores)
    return f"| {name} {said} | {rows[1] / tasks:.2f} | {counts} | {why} | {differences} | {right:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--command", nargs=argparse.REMAINDER, default=[], help="The program of `command`; comes last.")
    args = parser.parse_args()
    print("| program | one row | rollouts x rows | forks | differences that count as none | score |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.programs:
            for settings in PROGRAMS[name]:
                given = command_settings(args.command, args.tasks, Path(folder)) if name == "command" else settings
                print(measured(name, given, args.tasks), flush=True)


if __name__ == "__main__":
    main()
