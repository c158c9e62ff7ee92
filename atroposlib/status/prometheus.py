"""A run's status as Prometheus metrics, read from its folder at every scrape: all its processes, whoever died.

The trajectory API has `/metrics` of its own, SGLang too; `docs/grafana.json` is a dashboard of the first two.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
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
            return [_family(GaugeMetricFamily, self._folder.name, "up", "1 while it runs.", 0)]

    def describe(self) -> Iterable[Metric]:
        return []


def metrics_of(status: RunStatus) -> Iterator[Metric]:
    """Yield a run's metrics; all have the label `run`."""
    gauge, counter = (partial(_family, kind, status.name) for kind in (GaugeMetricFamily, CounterMetricFamily))
    yield gauge("up", "1 while it runs.", status.running)
    yield gauge("waiting", "1 while it waits for something.", bool(status.waiting_for))
    yield gauge("updated_seconds", "When it said something last, since the epoch.", status.updated_at)
    for name, text in _GAUGES.items():
        yield gauge(name, text, getattr(status, name))
    for name, (metric, text) in _COUNTERS.items():
        yield counter(metric, text, getattr(status, name))
    for name, (metric, label, text) in _BY_LABEL.items():
        yield counter(metric, text, getattr(status, name), label)
    ready = {service.name: status.running and service.state == "ready" for service in status.services}
    yield gauge("service_ready", "1 while a process is there and ready.", ready, "service")
    if status.training is not None:
        yield gauge("training_step", "Steps taken.", status.training.step)
        last = {key: value for key, value in status.training.last.items() if isinstance(value, int | float)}
        yield gauge("training", "What the trainer logged last.", last, "metric")


def serve_metrics(folder: Path, host: str, port: int) -> WSGIServer:
    """Serve the metrics of a run from a thread; OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(folder))
    server, _ = start_http_server(port, host, registry)
    return server


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    run: str,
    name: str,
    text: str,
    value: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    """One metric of a run: a number, or one for each value of `label`."""
    family = kind(f"atropos_run_{name}", text, labels=["run", label] if label else ["run"])
    for key, each in value.items() if isinstance(value, Mapping) else [("", value)]:
        family.add_metric([run, key] if label else [run], each)
    return family
