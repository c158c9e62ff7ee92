"""From settings to items: the problem of an index, in the words in which the model gets it.

An item is `(messages, {"task_name", "raw_prompt", "identity", "identity_format", "demonstration"})`; it depends on the
settings and the index alone. A problem whose generator failed has `"fault"`, the reason, in place of an identity.
"""

import logging
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from atroposlib.environments.intern_bootcamp.bootcamp import FORM, Grading
from atroposlib.environments.intern_bootcamp.bootcamp_config import (
    ALL_DATASETS,
    RANDOM_TASK,
    InternBootcampEnvConfig,
)
from atroposlib.environments.intern_bootcamp.checkout import module_faults, read_quarantine
from atroposlib.environments.intern_bootcamp.hosted import Drawn
from atroposlib.environments.intern_bootcamp.own import OWN_BOOTCAMPS
from atroposlib.environments.intern_bootcamp.seeds import Mixture, derive_seed
from atroposlib.environments.intern_bootcamp.set_aside import SET_ASIDE
from atroposlib.environments.intern_bootcamp.tasks import (
    REASONING_GYM,
    WAYS_OUT,
    Task,
    all_datasets,
    checkout_classes,
    make_task,
)
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault
from atroposlib.paths import expand_path
from atroposlib.sandbox.workers import WorkerPool
from atroposlib.type_definitions import JsonObject, Message
from atroposlib_engine.models import CATALOG

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]
Problem = tuple[list[Message], JsonObject]

SLOW_FAILURE_LIMIT = 3
"""Slow failures in a row after which a generator is not run any more: while it hangs, no other problem is drawn."""

SAMPLES = 3
"""Prompts that a preview shows."""
SAMPLE_LENGTH = 400
"""Characters of each."""
REASONS = 6
"""Reasons for setting tasks aside that a preview names."""
NAMED_TASKS = 8
"""Tasks of a mixture that a preview names."""

THINKING_PROMPT = (
    "Think about the problem step by step inside <think> and </think>. After that, give your final answer in exactly "
    "the form that the problem asks for."
)


class ProblemSource:
    """The problems of one configuration."""

    def __init__(self, config: InternBootcampEnvConfig) -> None:
        """ConfigError when a task or one of its parameters does not exist."""
        self.sandbox = WorkerPool(
            workers=config.verifier_workers,
            timeout_s=config.verifier_timeout_s,
            memory_mb=config.verifier_memory_mb,
        )
        self._config = config
        self._checkout = _folder(config.internbootcamp_path, "env.internbootcamp_path")
        self.set_aside: dict[str, str] = {}  # tasks in quarantine, and why
        self._weights = self._task_weights()
        self._mixtures = {split: Mixture(self._weights, f"{config.seed}/{split}") for split in ("train", "eval")}
        self.tasks = {name: self._make_task(name) for name in self._weights}
        self._shots: dict[str, list[Drawn]] = {}
        self._slow_failures: Counter[str] = Counter()

    async def check(self) -> None:
        """Draw one problem of each reasoning-gym dataset; ConfigError names the one that is misspelt or misused."""
        if self._config.task_name == ALL_DATASETS:
            return  # one that does not work is set aside
        for name, task in self.tasks.items():
            if name.startswith(REASONING_GYM):
                try:
                    await task.draw(0)
                except EnvironmentFault as fault:
                    params = self._params_of(name)
                    raise ConfigError(f"task {name!r} with parameters {params} cannot be used: {fault}") from fault

    async def problem(self, index: int, split: Split = "train") -> Problem:
        """Item number `index` of a split."""
        name = self._mixtures[split].task_of(index)
        meta: JsonObject = {"task_name": name}
        try:
            drawn = await self._draw(self.tasks[name], derive_seed(self._config.seed, split, name, index))
            messages = await self._messages(name, drawn)
        except EnvironmentFault as fault:
            return [], {**meta, "raw_prompt": "", "fault": str(fault)}
        identity = {name: drawn[name] for name in ("identity", "identity_format", "demonstration")}
        return messages, {**meta, "raw_prompt": messages[-1].get("content"), **identity}

    async def verify(self, output: str, meta: JsonObject) -> float:
        """Return the verdict of the task's verifier about one output, as it gives it.

        Raises:
            VerifierFault: it says nothing.
        """
        config = self._config
        grading = Grading(
            format_score=config.format_bonus,
            short_penalty=config.require_reasoning,
            short_threshold=config.min_reasoning_length,
            format_penalty=config.require_reasoning,
        )
        task = self.tasks.get(meta["task_name"])
        if task is None:
            raise VerifierFault(f"task {meta['task_name']!r} of this item is not among those configured")
        return await task.verify(output, meta["identity"], meta["identity_format"], grading)

    async def preview(self) -> list[str]:
        """Return lines about what the run will ask: the mixture, what is set aside and why, the first prompts."""
        lines = [self._mixture_line()]
        if self.set_aside:
            lines += _counted(f"in quarantine ({self._config.quarantine_path})", self.set_aside)
        classes = checkout_classes(self._checkout) if self._checkout and not self._uses_only_others() else {}
        if faults := module_faults(self._checkout or "", {n: m for n, m in classes.items() if n in self.tasks}):
            lines += _counted("cannot be used here, and will be set aside after failing", faults)
        asked = 0
        for index in range(4 * SAMPLES):
            messages, meta = await self.problem(index)
            text = meta.get("fault") or messages[-1].get("content")
            what = "fails" if "fault" in meta else "asks"
            lines.append(f"problem {index}, {meta['task_name']}, {what}: {textwrap.shorten(str(text), SAMPLE_LENGTH)}")
            asked += "fault" not in meta
            if asked == SAMPLES:
                break
        return lines

    def _mixture_line(self) -> str:
        total, weights = sum(self._weights.values()), self._weights
        named = [f"{name} {weight / total:.1%}" for name, weight in list(weights.items())[:NAMED_TASKS]]
        more = f", and {len(weights) - NAMED_TASKS} more" if len(weights) > NAMED_TASKS else ""
        source = f" of {self._checkout}" if self._checkout and not self._uses_only_others() else ""
        return f"mixture: {len(weights)} task{'s' if len(weights) > 1 else ''}{source}: {', '.join(named)}{more}"

    def _uses_only_others(self) -> bool:
        """No task of the mixture is a class of the checkout."""
        return all(name in OWN_BOOTCAMPS or name.startswith(REASONING_GYM) for name in self._weights)

    async def close(self) -> None:
        """End the worker processes."""
        self.sandbox.close()

    async def _draw(self, task: Task, seed: int) -> Drawn:
        if self._slow_failures[task.name] >= SLOW_FAILURE_LIMIT:
            raise EnvironmentFault(f"the generator of {task.name} took too long {SLOW_FAILURE_LIMIT} times in a row")
        started = time.monotonic()
        try:
            drawn = await task.draw(seed)
        except EnvironmentFault:
            is_slow = time.monotonic() - started > self._config.verifier_timeout_s / 2
            self._slow_failures[task.name] = self._slow_failures[task.name] + 1 if is_slow else 0
            raise
        self._slow_failures[task.name] = 0
        return drawn

    async def _messages(self, name: str, drawn: Drawn) -> list[Message]:
        messages: list[Message] = []
        system = self._config.system_prompt
        if system is None and self._config.require_reasoning:
            system = THINKING_PROMPT
        if system:
            messages.append({"role": "system", "content": system})
        shots = [shot for shot in await self._shots_of(name) if shot["prompt"] != drawn["prompt"]]
        for shot in shots[: self._config.few_shot]:
            messages.append({"role": "user", "content": shot["prompt"]})
            messages.append({"role": "assistant", "content": shot["demonstration"] or ""})
        is_shown = bool(shots) or name not in OWN_BOOTCAMPS
        return [*messages, {"role": "user", "content": drawn["prompt"] + ("" if is_shown else FORM)}]

    async def _shots_of(self, name: str) -> list[Drawn]:
        """One solved problem more than is shown, since the one that is asked must not be among them."""
        if self._config.few_shot == 0:
            return []
        if name not in self._shots:
            shots: dict[str, Drawn] = {}
            for number in range(10 * self._config.few_shot):
                shot = await self._draw(self.tasks[name], derive_seed(self._config.seed, "shot", name, number))
                if shot["demonstration"] is None:
                    logger.warning("no few-shot turns: task %s knows no right answers to show", name)
                    break
                shots[shot["prompt"]] = shot
                if len(shots) > self._config.few_shot:
                    break
            self._shots[name] = list(shots.values())
        return self._shots[name]

    def _task_weights(self) -> dict[str, float]:
        config = self._config
        if config.task_name not in (RANDOM_TASK, ALL_DATASETS):
            return {config.task_name: 1.0}
        weights = config.task_weights or dict.fromkeys(self._all_names(), 1.0)
        quarantine = _folder(config.quarantine_path, "env.quarantine_path")
        bad = _read_quarantine(quarantine) if quarantine else {}
        self.set_aside = {name: bad[name] for name in weights if name in bad}
        good = {name: weight for name, weight in weights.items() if name not in bad}
        if not good:
            raise ConfigError(f"every task of the mixture is in quarantine ({quarantine}); nothing is left to draw")
        unknown = config.task_params.keys() - weights.keys()
        if unknown:
            raise ConfigError(f"env.task_params names {', '.join(sorted(unknown))}, which the mixture does not have")
        return good

    def _all_names(self) -> Iterable[str]:
        if self._config.task_name == ALL_DATASETS:
            return all_datasets()
        if self._checkout:
            return checkout_classes(self._checkout)
        return [name for name in OWN_BOOTCAMPS if name not in SET_ASIDE]

    def _params_of(self, name: str) -> JsonObject:
        params = self._config.task_params
        return params.get(name, {}) if self._config.task_name in (RANDOM_TASK, ALL_DATASETS) else params

    def _make_task(self, name: str) -> Task:
        return make_task(name, self._params_of(name), self.sandbox, self._checkout)


def require_chosen_tasks(config: InternBootcampEnvConfig, models: Iterable[str]) -> None:
    """Refuse to ask a real model the toy problems of `own.py` because nobody said what else to ask it.

    Raises:
        ConfigError: neither a checkout nor weights are set, and a model is not one of the embedded engine.
    """
    if config.task_name != RANDOM_TASK or config.task_weights or config.internbootcamp_path:
        return
    for model in models:
        if model not in CATALOG:
            raise ConfigError(
                f"no task is chosen for {model!r}: env.internbootcamp_path and env.task_weights are not set. {WAYS_OUT}"
            )


def _counted(what: str, reasons: Mapping[str, str]) -> list[str]:
    """Count the tasks, and each reason, the most frequent first."""
    counts = Counter(textwrap.shorten(reason, 160) for reason in reasons.values())
    lines = [f"{len(reasons)} task{'s' if len(reasons) > 1 else ''} {what}:"]
    lines += [f"  {count} x {reason}" for reason, count in counts.most_common(REASONS)]
    return [*lines, f"  and {len(counts) - REASONS} other reasons"] if len(counts) > REASONS else lines


def _folder(path: str | None, what: str) -> str | None:
    return None if path is None else str(expand_path(path, what=what).absolute())


def _read_quarantine(path: str) -> dict[str, str]:
    try:
        return read_quarantine(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"env.quarantine_path {path} cannot be read: {error}; make it again") from error
