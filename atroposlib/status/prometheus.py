"""A run's status as Prometheus metrics, read from its folder at every scrape: all its processes, whoever died.

The trajectory API has `/metrics` of its own, SGLang too; `docs/grafana.json` is a dashboard of the first two.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atroposlib.errors import LaunchError
from atroposlib.status.runs import RunStatus, read_status

_GAUGES = {
    "problems": "Problems of the run; 0: without a limit.",
    "share_done": "Done of the limit that is nearest, 0 to 1.",
    "starts": "Times that it was started.",
    "in_flight": "Groups being rolled out.",
    "engine_running": "Requests that run, as the engines say.",
    "engine_queued": "Requests that wait, as the engines say.",
    "engine_slots": "The most requests that ever ran at once.",
}
_COUNTERS = {
    "groups_done": ("groups", "Groups recorded."),
    "responses": ("responses", "Responses recorded."),
    "accepted": ("accepted_responses", "Responses that passed."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of recorded groups."),
    "completion_tokens": ("completion_tokens", "Generated tokens of recorded groups."),
}
_BY_LABEL = {
    "wasted": ("wasted_tokens", "cause", "Generated tokens of no use."),
    "failures": ("failures", "class", "Failed rollouts."),
    "rejected": ("rejected_groups", "reason", "Groups of no use, since the last start."),
    "restarts": ("service_restarts", "service", "Restarts of a process, over all starts."),
}


class RunMetrics(Collector):
    """Gives the metrics of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        try:
            return list(metrics_of(read_status(self._folder)))
        except LaunchError:  # there is no run (any more)
            return [_labelled(GaugeMetricFamily, "up", "1 while it runs.", self._folder.name, {"": 0})]

    def describe(self) -> Iterable[Metric]:
        return []


def metrics_of(status: RunStatus) -> Iterator[Metric]:
    """Yield a run's metrics; all have the label `run`."""
    run = status.name
    yield _labelled(GaugeMetricFamily, "up", "1 while it runs.", run, {"": status.running})
    yield _labelled(
        GaugeMetricFamily, "waiting", "1 while it waits for something.", run, {"": bool(status.waiting_for)}
    )
    yield _labelled(
        GaugeMetricFamily,
        "updated_seconds",
        "When it said something last, since the epoch.",
        run,
        {"": status.updated_at},
    )
    for name, text in _GAUGES.items():
        yield _labelled(GaugeMetricFamily, name, text, run, {"": getattr(status, name)})
    for name, (metric, text) in _COUNTERS.items():
        yield _labelled(CounterMetricFamily, metric, text, run, {"": getattr(status, name)})
    for name, (metric, label, text) in _BY_LABEL.items():
        yield _labelled(CounterMetricFamily, metric, text, run, getattr(status, name), label)
    ready = {service.name: status.running and service.state == "ready" for service in status.services}
    yield _labelled(GaugeMetricFamily, "service_ready", "1 while a process is there and ready.", run, ready, "service")
    if status.training is not None:
        yield _labelled(GaugeMetricFamily, "training_step", "Steps taken.", run, {"": status.training.step})
        last = {key: value for key, value in status.training.last.items() if isinstance(value, int | float)}
        yield _labelled(GaugeMetricFamily, "training", "What the trainer logged last.", run, last, "metric")


def serve_metrics(folder: Path, host: str, port: int) -> WSGIServer:
    """Serve the metrics of a run from a thread; OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(folder))
    server, _ = start_http_server(port, host, registry)
    return server


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    run: str,
    values: Mapping[str, float],
    label: str | None = None,
) -> Metric:
    family = kind(f"atropos_run_{name}", text, labels=["run"] if label is None else ["run", label])
    for key, value in values.items():
        family.add_metric([run] if label is None else [run, key], value)
    return family
