"""What a drill shows: is the run exact, and the table of its figures."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from atroposlib.envs.server_handling.one_by_one import digest_of, seed_of
from tests.fakes import FakeTokenizer
from tests.mock_llm import MockEngine, parser
from tests.scale.drill import Break, Drill
from tests.scale.scale_env import is_too_long

SETTLE_S = 2.0
_ENDS_STREAMS = ("engine", "environment", "supervisor", "everything")
"""After a break, the time until the count of problems grows again, and these seconds, do not count as undisturbed."""


class NotExactError(AssertionError):
    """The rollout files are not what an undisturbed run would hold."""


@dataclass(frozen=True)
class Figures:
    """The table. Times in seconds, sizes in MB, shares 0 to 1."""

    problems: int
    responses: int
    breaks: dict[str, int]
    wall_s: float
    ideal_s: float  # all recorded tokens with every slot always busy
    outage_s: float
    occupancy: float  # from the first request to the tail, outage and breaks included
    occupancy_undisturbed: float
    peak_mb: dict[str, float]
    cpu_ms: dict[str, float]  # of each service, a recorded response
    in_flight_at_kills: int  # tokens of unfinished responses that kills met, with streams
    generated_tokens: int
    recorded_tokens: int
    requests: int
    faults: dict[str, int]
    resume_s: list[float]  # environment's start to its first request
    restart_s: list[float]  # command's start to the first request
    sha256: str  # of the dataset

    def lines(self) -> list[str]:
        """The table in Markdown."""
        generated, wasted = self.generated_tokens, self.generated_tokens - self.recorded_tokens
        broken = ", ".join(f"{count} {what}" for what, count in sorted(self.breaks.items()))
        busy, calm = self.occupancy, self.occupancy_undisturbed
        errors, drops = self.faults.get("errors", 0), self.faults.get("drops", 0)
        rows = [
            ("recorded", f"{self.problems:,} x {self.responses}, each problem once, every response as undisturbed"),
            ("broken", broken or "nothing"),
            ("wall", f"{self.wall_s:,.0f} s; ideal {self.ideal_s:,.0f} s; outage {self.outage_s:.0f} s"),
            ("slots busy until the tail", f"{busy:.1%}; while nothing was broken {calm:.1%}"),
            ("largest memory", ", ".join(f"{name} {mb:.0f} MB" for name, mb in sorted(self.peak_mb.items()))),
            ("environment's start to first request", _seconds(self.resume_s)),
            ("command's start to first request", _seconds(self.restart_s)),
            ("requests", f"{self.requests:,}; {errors:,} 5xx, {drops:,} dropped"),
            ("CPU a response", ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(self.cpu_ms.items()))),
            ("tokens in flight at kills", f"{self.in_flight_at_kills:,}"),
            ("tokens generated in vain", f"{wasted:,} of {generated:,} ({wasted / generated:.2%})"),
        ]
        return ["| what | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def check_exact(drill: Drill) -> None:
    """Every problem that the engine takes once, in whole groups, every response as it must be.

    Raises:
        NotExactError: what is missing, doubled or different.
    """
    plan = drill.plan
    engine = MockEngine(parser().parse_args(["--port", "1", "--tokens", str(plan.tokens), "--sigma", str(plan.sigma)]))
    keys: Counter[int] = Counter()
    for record in _records(drill.run_dir / "rollouts"):
        index = int(record["item_key"])
        keys[index] += 1
        if len(record["tokens"]) != plan.responses or len(record["scores"]) != plan.responses:
            raise NotExactError(f"problem {index} has {len(record['tokens'])} responses instead of {plan.responses}")
        if record["tokens"] != expected_responses(engine, drill, index):
            raise NotExactError(f"problem {index}: the responses are not those of an undisturbed run")
    expected = wanted_items(plan.problems, plan.too_long_every)
    if keys != Counter(expected):
        doubled = [index for index, count in keys.items() if count > 1]
        missing = sorted(set(expected) - keys.keys())
        raise NotExactError(f"{len(keys)} problems; doubled {doubled[:9]}, missing {missing[:9]} ({len(missing)})")


def wanted_items(problems: int, too_long_every: int) -> list[int]:
    """The first items, that many, whose prompts the engine takes."""
    wanted: list[int] = []
    index = 0
    while len(wanted) < problems:
        if not is_too_long(index, too_long_every):
            wanted.append(index)
        index += 1
    return wanted


def expected_responses(engine: MockEngine, drill: Drill, index: int) -> list[list[int]]:
    """[G][T] prompt and response of every sample, known from its seed (without a journal: from its index) alone."""
    plan = drill.plan
    messages = [{"role": "user", "content": f"{index} + {7 * index % 1000}"}]
    ids = FakeTokenizer().apply_chat_template(messages, add_generation_prompt=True)
    asked = {"input_ids": ids, "max_tokens": plan.max_tokens, "temperature": 1.0}
    samples = list(range(plan.responses))
    if plan.journal != "off":
        digest = digest_of("tokens", "mock", asked)
        samples = [seed_of(1, str(index), digest + i.to_bytes(4, "big")) for i in samples]
    return [ids + engine.response(ids, sample)[0][: plan.max_tokens] for sample in samples]


def figures(drill: Drill) -> Figures:
    """The table of a finished drill."""
    plan = drill.plan
    trace = [json.loads(line) for line in drill.trace.read_text().splitlines()]
    totals: Counter[str] = Counter()
    for tick in trace:
        totals.update({name: tick.get(name, 0) for name in ("tokens", "requests", "errors", "drops")})
    first = int(next(tick["at"] for tick in trace if tick.get("requests"))) + 1
    busy = _by_second(trace)
    running = range(first, int(drill.tail_at))
    calm = [second for second in running if not any(_is_disturbed(second, broken) for broken in drill.breaks)]
    tokens = sum(record["usage"]["completion_tokens"] for record in _records(drill.run_dir / "rollouts"))
    return Figures(
        problems=plan.problems,
        responses=plan.responses,
        breaks=dict(Counter(broken.what for broken in drill.breaks)),
        wall_s=drill.ended_at - drill.started_at,
        ideal_s=tokens / (plan.slots * plan.tps) if plan.tps else 0.0,
        outage_s=plan.outage_s,
        occupancy=_occupancy(busy, running, plan.slots),
        occupancy_undisturbed=_occupancy(busy, calm, plan.slots),
        peak_mb=drill.peak_mb,
        cpu_ms=_cpu_ms(drill),
        in_flight_at_kills=sum(_open_tokens(trace, each.at) for each in drill.breaks if each.what in _ENDS_STREAMS),
        generated_tokens=totals["tokens"],
        recorded_tokens=tokens,
        requests=totals["requests"],
        faults=dict(totals),
        resume_s=_delays(list(drill.environments.values()), trace),
        restart_s=_delays(drill.supervisors, trace),
        sha256=hashlib.sha256((drill.run_dir / "sft.jsonl").read_bytes()).hexdigest(),
    )


def _cpu_ms(drill: Drill) -> dict[str, float]:
    total: Counter[str] = Counter()
    for (name, _), seconds in drill.cpu_s.items():
        total[name] += seconds
    return {name: 1000 * seconds / (drill.plan.problems * drill.plan.responses) for name, seconds in total.items()}


def _open_tokens(trace: list[dict[str, Any]], at: float) -> int:
    """Tokens of streams that were under way at that time."""
    return next((tick.get("open_tokens", 0) for tick in reversed(trace) if tick["at"] <= at), 0)


def _records(folder: Path):
    for path in sorted(folder.glob("*_rollouts_*.jsonl")):
        for line in path.read_bytes().splitlines():
            yield orjson.loads(line)


def _by_second(trace: list[dict[str, Any]]) -> Counter[int]:
    """Busy slot-seconds of each second."""
    seconds: Counter[int] = Counter()
    for tick in trace:
        seconds[int(tick["at"])] += tick["busy_s"]
    return seconds


def _occupancy(busy: Counter[int], seconds: Sequence[int], slots: int) -> float:
    """Share of the slots' time that was used; 0.0 when the run was over before it could be told."""
    return sum(busy[second] for second in seconds) / (len(seconds) * slots) if seconds else 0.0


def _is_disturbed(at: int, broken: Break) -> bool:
    return broken.at - 1 <= at and (broken.recovered_at is None or at <= broken.recovered_at + SETTLE_S)


def _delays(starts: list[float], trace: list[dict[str, Any]]) -> list[float]:
    """Seconds from each start to the first request after it; starts that were killed before count for nothing."""
    arrivals = [tick["first_at"] for tick in trace if "first_at" in tick]
    delays = []
    for start, following in zip(starts, [*starts[1:], float("inf")], strict=True):
        arrival = next((at for at in arrivals if start < at < following), None)
        if arrival is not None:
            delays.append(arrival - start)
    return delays


def _seconds(delays: list[float]) -> str:
    if not delays:
        return "-"
    return f"median {median(delays):.1f} s, largest {max(delays):.1f} s ({len(delays)} starts)"
