"""Try every environment file below a folder, unmodified: import, config, set-up, and a few groups of a scripted engine.

    python tests/compat/environment_files.py path/to/environments
    python tests/compat/environment_files.py path/to/environments --markdown table.md --only gsm8k

No network is used. Hub data sets are replaced by a few rows of sums under the usual column names, which many files can
use; the verdict says so. What asks a model hub, a service or a package that is not installed is reported as such.
Rollout environments run `process`, environments without rollouts and `EvalBase` classes run `evaluate`. Every file has
a process of its own, forked from one that has imported what all of them need. Exit code 1: a file failed otherwise.
"""

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

GROUPS, GROUP_SIZE, MAX_TOKENS, MOST_ITEMS = 2, 2, 1024, 20
ROOT = Path(__file__).parents[2]
CLASS = re.compile(r"^class \w+\(.*?(Env|EvalBase)\w*\b", re.M | re.S)
ENDS = ("done", "kept nothing")
LATE = "not at its end after"
NOTHING_KEPT = "none gave a usable group"
MISSING = (
    (r"No module named '([\w.]+)'", "package {}"),
    (r"(?:connect to the Hub|offline mode|OfflineMode|huggingface\.co|not found on the Hub|on the Hub)", "hub data"),
    (r"(?:API_KEY|api_key|TOKEN) .*(?:not set|must be set|required|is missing|environment variable)", "an API key"),
    (r"(?:getaddrinfo|Name or service not known|Temporary failure in name|Cannot connect to host|ConnectError|"
     r"Max retries exceeded|Connection refused)", "a service"),
    (r"(?:API_KEY|api_key|Missing credentials)", "an API key"),
    (r"Resource '?(?:\x1b\[\d+m)*(\w+)[^.]*not found.*NLTK", "NLTK's {}"),
    (r"Executable doesn't exist at \S*/([\w-]+)", "program {}"),
    (r"SystemExit: .* <- FileNotFoundError: .*'([\w-]+)'$", "program {}"),
    (r"no complete environment in it", "nothing: no complete environment in it{}"),
    (r"No such file or directory: '(?:[^']*/)?([^'/]+)'", "file {}"),
)  # fmt: skip


@dataclass
class Report:
    """How far one file came."""

    file: str
    cls: str = ""
    stage: str = "import"
    groups: int = 0
    error: str = ""
    data: str = ""  # hub sets that were replaced

    @property
    def verdict(self) -> str:
        """`runs`, `needs ...` (nothing a library can give), or `fails`."""
        if self.stage == ENDS[0]:
            return "runs on stand-in data" if self.data else "runs"
        if self.stage == ENDS[1]:
            return "runs, but keeps no group of the scripted answers"
        if self.error.startswith(LATE):
            return "still runs at the time limit"
        for pattern, what in MISSING:
            if found := re.search(pattern, self.error, re.I | re.S):
                return "needs " + what.format(*(found.groups() or ("",)))
        return f"needs its data, {self.data}" if self.data and self.stage in ("setup", "rollout") else "fails"


def main() -> int:
    """Report on all files; the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--only", default="", help="files whose path contains this")
    options.add_argument("--seconds", type=int, default=60, help="for one file")
    options.add_argument("--markdown", type=Path, help="write the table here too")
    options.add_argument("--logs", type=Path, help="folder for what each file prints")
    given = options.parse_args()
    given.folder = given.folder.resolve()
    files = sorted(path for path in given.folder.rglob("*.py") if given.only in str(path) and is_environment(path))
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
    logs = given.logs.resolve() if given.logs else Path(tempfile.mkdtemp(prefix="environment-files-"))
    logs.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(logs / "tokenizer")
    engine, url = start_engine(logs)
    import_all()
    reports = []
    try:
        for path in files:
            name = str(path.relative_to(given.folder))
            reports.append(try_file(path, name, given.folder, url, tokenizer, logs, given.seconds))
            print(line(reports[-1]), flush=True)
    finally:
        engine.terminate()
        engine.wait()
    verdicts = Counter(report.verdict.split()[0] for report in reports)
    print(f"{len(reports)} files: {dict(verdicts)}; what they printed lies in {logs}")
    if given.markdown:
        given.markdown.write_text("\n".join(table(reports)) + "\n")
    return int(verdicts["fails"] > 0)


def is_environment(path: Path) -> bool:
    """Whether the file defines an environment or an evaluation."""
    text = path.read_text(errors="replace")
    return "atroposlib" in text and bool(CLASS.search(text)) and not path.name.startswith("test_")


def line(report: Report) -> str:
    """One report in one line."""
    return f"{report.verdict:<28} {report.stage:<12} {report.groups} {report.file} {report.cls}  {report.error[:160]}"


def table(reports: Iterable[Report]) -> list[str]:
    """The reports as a Markdown table, a row for each verdict."""
    files: dict[str, list[str]] = {}
    for each in sorted(
        reports, key=lambda report: (not report.verdict.startswith("runs"), report.verdict, report.file)
    ):
        why = f": {each.error.splitlines()[0][:110]}" if each.verdict == "fails" else ""
        files.setdefault(each.verdict + why, []).append(f"`{each.file.removesuffix('.py')}`")
    rows = [f"| {verdict.replace('|', '/')} | {len(names)} | {', '.join(names)} |" for verdict, names in files.items()]
    return ["| verdict | files | which |", "|---|---|---|", *rows]


def import_all() -> None:
    """Import what nearly every file imports, once, before the forks; datasets only if it is there."""
    import transformers  # noqa: F401

    import atroposlib.envs.base
    import atroposlib.envs.eval  # noqa: F401

    if importlib.util.find_spec("datasets"):
        import datasets  # noqa: F401  # pyright: ignore[reportMissingImports]


def load(path: Path, root: Path) -> ModuleType:
    """Import a file, as a part of its package where it imports from its neighbours by dots."""
    if re.search(r"^\s*from \.", path.read_text(errors="replace"), re.M):
        return importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(f"tried_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def try_file(path: Path, name: str, root: Path, url: str, tokenizer: Path, logs: Path, seconds: int) -> Report:
    """Fork a process for the file; what it reported before its end."""
    log = logs / (name.replace("/", "__") + ".log")
    result = logs / (name.replace("/", "__") + ".json")
    result.write_text(json.dumps(asdict(Report(name))))
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with log.open("w") as stream, open(os.devnull) as nothing:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            os.dup2(nothing.fileno(), 0)
        Trial(Report(name), result, url, tokenizer).run(path, root)
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            report = Report(**json.loads(result.read_text()))
            report.error = report.error or f"{LATE} {seconds} s"
            return report
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # pools that it left
    report = Report(**json.loads(result.read_text()))
    if report.stage not in ENDS and not report.error:
        report.error = f"its process died in {report.stage}"
    return report


class Trial:
    """One file, in the process of its own."""

    def __init__(self, report: Report, result: Path, url: str, tokenizer: Path) -> None:
        self.report, self.result, self.url, self.tokenizer = report, result, url, tokenizer

    def run(self, path: Path, root: Path) -> None:
        """Never returns."""
        folder = Path(tempfile.mkdtemp(prefix="atropos-file-"))
        os.chdir(folder)
        logging.basicConfig(level=logging.INFO)
        sys.path[:0] = [str(path.parent), str(root.parent), str(root)]
        sys.argv = [str(path)]
        self._stand_in()
        try:
            self._try(path, root, folder)
            self._reach(ENDS[self.report.stage == "rollout" and not self.report.groups])
        except BaseException as error:
            traceback.print_exc()
            chain = [error]
            while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
                chain.append(cause)
            self.report.error = " <- ".join(f"{type(each).__name__}: {each}" for each in chain)[:1500]
            self._reach(self.report.stage)
        sys.stdout.flush()
        os._exit(0)

    def _reach(self, stage: str) -> None:
        self.report.stage = stage
        self.result.write_text(json.dumps(asdict(self.report)))

    def _stand_in(self) -> None:
        """Let `load_dataset` give rows of sums."""
        if "datasets" not in sys.modules:
            return
        import datasets  # pyright: ignore[reportMissingImports]

        def load_dataset(path: str, name: str | None = None, *, split: str | None = None, **_: Any) -> Any:
            self.report.data = ", ".join(dict.fromkeys([*filter(None, self.report.data.split(", ")), str(path)]))
            self._reach(self.report.stage)
            rows = datasets.Dataset.from_list(stand_in_rows(f"{path} {name}".lower()))
            return rows if split else datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

        datasets.load_dataset = load_dataset

    def _try(self, path: Path, root: Path, folder: Path) -> None:
        from atroposlib.envs.base import BaseEnv
        from atroposlib.envs.eval import EvalBase

        module = load(path, root)
        own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
        kinds = [each for each in own if issubclass(each, BaseEnv | EvalBase) and not inspect.isabstract(each)]
        if not kinds:
            raise LookupError("no complete environment in it")
        cls = kinds[-1]
        self.report.cls = cls.__name__
        if issubclass(cls, EvalBase):
            self._evaluate_base(cls)
        else:
            self._environment(cls, folder)

    def _server(self, given: Any) -> Any:
        from atroposlib.envs.base import APIServerConfig

        first = given[0] if isinstance(given, list | tuple) and given else given
        model = getattr(first, "model_name", "mock")
        return APIServerConfig(
            model_name=model,
            base_url=f"{self.url}/v1",
            api_key="x",
            server_type="sglang",
            tokenizer_name=str(self.tokenizer),
            num_requests_for_eval=16,
            timeout=20,
        )

    def _environment(self, cls: Any, folder: Path) -> None:
        self._reach("config_init")
        config, servers = cls.config_init()
        wanted = {
            "tokenizer_name": str(self.tokenizer),
            "use_wandb": False,
            "group_size": GROUP_SIZE,
            "total_steps": GROUPS,
            "max_token_length": min(MAX_TOKENS, config.max_token_length),
            "ensure_scores_are_not_same": False,
            "include_messages": True,
            "worker_timeout": 30.0,
            "max_num_workers": GROUPS,
            "custom_thinking_prompt": "Think between <think> and </think>, then answer.",  # evaluations need one
            "data_path_to_save_groups": str(folder / "groups.jsonl"),
            "data_dir_to_save_evals": str(folder / "evals"),
        }
        config = config.model_copy(update=wanted)
        self._reach("construct")
        env = cls(
            config,
            [self._server(servers)] * (len(servers) if isinstance(servers, list | tuple) and servers else 1),
            False,
            False,
        )
        from atroposlib.envs.base import BaseEnv
        from atroposlib.errors import AtroposError

        hooks = ("collect_trajectories", "collect_trajectory")
        rolls_out = "eval" not in self.report.file and any(getattr(cls, h) is not getattr(BaseEnv, h) for h in hooks)
        setup, next_item = env.setup, env.get_next_item

        async def set_up() -> None:
            self._reach("setup")
            await setup()
            self._reach("rollout")

        turns = iter(range(MOST_ITEMS))

        async def next_item_of_few() -> Any:
            return None if next(turns, None) is None else await next_item()

        env.setup, env.get_next_item = set_up, next_item_of_few
        if not rolls_out:
            asyncio.run(env._run_evaluate())
            self._reach("evaluate")
            return
        env.process_mode = True
        env.n_groups_to_process, env.group_size_to_process = GROUPS, GROUP_SIZE
        try:
            asyncio.run(env.process_manager())
        except AtroposError as error:
            if NOTHING_KEPT not in str(error):
                raise
        finally:
            groups = folder / "groups.jsonl"
            self.report.groups = sum(1 for _ in groups.open()) if groups.exists() else 0

    def _evaluate_base(self, cls: Any) -> None:
        from atroposlib.envs.base import ServerManager

        self._reach("construct")
        evaluation = cls()
        self._reach("setup")
        asyncio.run(evaluation(ServerManager([self._server(None)])))


def stand_in_rows(name: str) -> list[dict[str, Any]]:
    """Eight sums under the column names that data sets of questions have."""
    rows = []
    for i in range(8):
        question, answer, choices = f"What is {i} + {i + 1}?", str(2 * i + 1), [str(2 * i + k) for k in range(4)]
        row: dict[str, Any] = dict.fromkeys(("question", "problem", "prompt", "instruction", "query", "text"), question)
        row |= dict.fromkeys(("answer", "final_answer", "target", "output", "response", "expected_answer"), answer)
        row |= {
            "solution": f"\\boxed{{{answer}}}",
            "choices": choices,
            "options": choices,
            "answerKey": "B",
            "label": 1,
        }
        row |= {"subject": "Algebra", "category": "math", "level": "Level 1", "type": "Algebra", "id": str(i)}
        if "gsm8k" in name:
            row["answer"] = f"{question} {answer}\n#### {answer}"
        if "mmlu" in name or "choice" in name:
            row["answer"] = "B" if "pro" in name else 1
        rows.append(row)
    return rows


def start_engine(logs: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The scripted engine on a free port of loopback, answering."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (logs / "engine.log").open("w") as log:
        command = [sys.executable, __file__, "--engine", "--port", str(port), "--tokens", "40", "--context", "32768"]
        engine = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 300  # on a busy machine
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return engine, f"http://127.0.0.1:{port}"
        except OSError as error:
            if time.monotonic() > deadline or engine.poll() is not None:
                raise SystemExit(f"the scripted engine does not answer; see {logs / 'engine.log'}") from error
            time.sleep(0.1)


def serve_engine() -> None:
    """Be the scripted engine: sums, right and wrong by turns, in the forms that verifiers look for."""
    sys.path.insert(0, str(ROOT))
    from aiohttp import web

    from tests.mock_llm import ARITHMETIC, MockEngine, parser

    class Scripted(MockEngine):
        def _answer(self, prompt: list[int], key: int) -> bytes:
            found = ARITHMETIC.findall(bytes(token for token in prompt if token < 256).decode("utf-8", "replace"))
            value, letter = (
                (sum(map(int, found[-1])), "B") if found and key * 40503 >> 16 & 1 else (key % 1000, "ACD"[key % 3])
            )
            return f"</think>\n<answer>{value}</answer>\nThe answer is \\boxed{{{value}}}, which is {letter}.".encode()

    options, _ = parser().parse_known_args()
    web.run_app(Scripted(options).app(), host="127.0.0.1", port=options.port, access_log=None, print=None)


def byte_tokenizer(folder: Path) -> Path:
    """A Hugging Face folder of the scripted engine's tokenizer: a token a byte, and three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<|im_end|>", "<|im_start|>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.content is string else (m.content | tojson) }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 32768,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 259}))
    return folder


if __name__ == "__main__":
    sys.exit(serve_engine() if "--engine" in sys.argv else main())
