"""A run's status for a terminal or a log: one line, or tables."""

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from atroposlib.status.runs import RunStatus
from atroposlib.type_definitions import FAILURE_CLASSES

if TYPE_CHECKING:  # an environment that writes its page draws no table
    from rich.console import Console, Group
    from rich.table import Table

logger = logging.getLogger(__name__)

_PATHS_SHOWN = 3
_LINE_EVERY_S = 10.0


def render(status: RunStatus) -> "Group":
    """Return the line of totals, counts by task, and everything else that `RunStatus` knows."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for name, value in facts_of(status):
        facts.add_row(name, Text(value, overflow="fold"))
    for kind, paths in status.outputs.items():
        shown = paths if len(paths) <= _PATHS_SHOWN else [*paths[:1], f"... {len(paths) - 2} more", paths[-1]]
        facts.add_row(kind, Text("\n".join(shown), overflow="fold"))
    return Group(Text(f"{status.name}: {headline(status)}"), *_tables(status), facts)


def _tables(status: RunStatus) -> "list[Table]":
    from rich.table import Table
    from rich.text import Text

    if status.kind == "evaluate":
        if not status.results:
            return []
        results = Table("metric", "value")
        for name, value in status.results.items():
            results.add_row(Text(name), f"{value:.4g}")
        return [results]
    tasks = Table()
    for column in ("task", "problems", "responses", "accepted", "share"):
        tasks.add_column(column, justify="left" if column == "task" else "right")
    for name, task in sorted(status.tasks.items()):
        label = f"{name} (set aside: {task.set_aside})" if task.set_aside else name
        share = f"{task.accepted / task.responses:.1%}" if task.responses else "-"
        tasks.add_row(Text(label), str(task.groups), str(task.responses), str(task.accepted), share)
    tasks.add_section()
    done = f"{status.groups_done} / {status.problems}" if status.problems else str(status.groups_done)
    tasks.add_row("all", done, str(status.responses), str(status.accepted), f"{status.accepted_share:.1%}")
    return [tasks]


def facts_of(status: RunStatus) -> list[tuple[str, str]]:
    """Return what a reader wants to know besides the counts by task, as (name, value)."""
    if status.kind == "evaluate":
        return _facts_of_evaluation(status)
    tokens = f"{status.completion_tokens:,} generated, {status.prompt_tokens:,} prompt, {status.tokens_per_s:.0f} tok/s"
    facts = [("failures", ", ".join(f"{name} {status.failures.get(name, 0)}" for name in FAILURE_CLASSES))]
    if status.in_flight:
        made = f"{status.in_flight} groups, {status.unfinished_answers} answers, {status.unfinished_tokens:,} tokens"
        speed = f"; engines {status.engine_tokens_s:,.0f} tokens/s" if status.engine_tokens_s else ""
        facts.append(("in the making", made + speed))
    if status.evaluating:
        facts.append(("evaluating", status.evaluating))
    if status.withheld:
        facts.append(("withheld", f"{status.withheld} groups, too long for the trainer"))
    if status.rejected:
        facts.append(("rejected", ", ".join(f"{reason} {groups}" for reason, groups in status.rejected.items())))
    facts.append(("tokens", tokens + (f", {status.tokens_per_s_now:.0f} now" if status.running else "")))
    if status.tokens_left and status.eta_s is not None:
        facts.append(("left", f"{status.tokens_left:,} tokens, {duration(status.eta_s)}"))
    if status.occupancy is not None:
        busy = f"{status.occupancy:.0%}: {status.engine_running} of {status.engine_slots} requests run"
        facts.append(("slots in use", f"{busy}, {status.engine_queued} wait"))
    causes = ", ".join(f"{cause} {tokens:,}" for cause, tokens in status.wasted.items())
    facts.append(("wasted tokens", f"{causes} ({status.wasted_share:.1%})"))
    if status.reused_tokens:
        facts.append(("reused tokens", f"{status.reused_tokens:,} from the response journal since the last start"))
    starts = f"{status.starts} start{'s' if status.starts != 1 else ''}"
    facts.append(("time", f"{duration(status.elapsed_s)} in {starts}"))
    facts.append(("restarts", ", ".join(f"{name} {count}" for name, count in status.restarts.items()) or "-"))
    if status.last_failure:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.last_failure.get("at") or 0))
        what = f"{status.last_failure.get('class')}, item {status.last_failure.get('item_key')}"
        facts.append(("last failure", f"{at} {what}: {status.last_failure.get('error')}"))
    if status.last_error:
        facts.append(("last error", status.last_error))
    if status.state == "done" and status.share_done < 1 and status.problems and not status.training:
        asked = f"{status.groups_done} of {status.problems} problems are recorded"
        facts.append(("short", f"{asked}; where there are more items, the same command adds the rest"))
    return facts


def _facts_of_evaluation(status: RunStatus) -> list[tuple[str, str]]:
    facts = [("time", duration(status.elapsed_s))]
    if status.results:
        return facts
    tokens = f"{status.responses} answers, {status.completion_tokens:,} tokens, {status.tokens_per_s_now:.0f} tok/s now"
    facts += [("answered", tokens), ("in flight", f"{status.in_flight} requests")]
    return [*facts, ("last error", status.last_error)] if status.last_error else facts


def headline(status: RunStatus) -> str:
    """One line: state, progress, pace, ETA."""
    if status.results:
        return f"{status.state}, {len(status.results)} metric{'s' if len(status.results) != 1 else ''}"
    if status.kind == "evaluate":
        items = f"{status.groups_done}/{status.problems} items" if status.problems else "evaluating"
        parts = [status.state, items, f"{status.responses} answers", f"{status.tokens_per_s_now:.0f} tok/s"]
    elif status.training:
        parts = [status.state, status.training.line(), f"{status.groups_done} problems rolled out"]
    else:
        problems = f"{status.groups_done}/{status.problems}" if status.problems else str(status.groups_done)
        parts = [
            status.state,
            f"{problems} problems",
            f"{status.responses} responses",
            f"{status.accepted_share:.0%} accepted",
            f"{status.tokens_per_s:.0f} tok/s",
        ]
    if status.running and status.eta_s and status.share_done < 1:
        parts.append(f"ETA {duration(status.eta_s)}")
    late = [service.name for service in status.services if status.running and service.state == "starting"]
    if late and not status.waiting_for:
        parts.append(f"waiting for {', '.join(late)} to get ready (logs: {', '.join(status.outputs.get('logs', []))})")
    if status.waiting_for:
        parts.append(f"waiting for {status.waiting_for}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """`seconds` as people say it.

    >>> duration(42), duration(190), duration(266400)
    ('42 s', '3 min 10 s', '74 h 0 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def print_status(status: RunStatus, console: "Console") -> None:
    """The tables; a pipe or a file gets every path on one line."""
    if not console.is_terminal:
        console.width = 400
    console.print(render(status))


class Display(contextlib.ExitStack):
    """Shows each status that it is called with: a table, or lines without a terminal. A context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._console = Console(stderr=True)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = self.enter_context(Live(console=self._console, auto_refresh=False, transient=True))
        self._next_line = 0.0

    def log_handler(self) -> logging.Handler:
        """Log lines above the live table, or plain ones with the time."""
        if self._live is not None:
            from rich.logging import RichHandler

            live = RichHandler(
                console=self._console, show_path=False, show_level=False, log_time_format="%H:%M:%S", markup=False
            )
            live.setFormatter(logging.Formatter("%(message)s"))
            return live
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        return handler

    def __call__(self, status: RunStatus) -> None:
        if self._live is not None:
            self._live.update(render(status), refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            logger.info("%s", headline(status))
