"""Numbers for Prometheus: what came in, what went out, what waits, how long requests took."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atroposlib.api.queue import Group

if TYPE_CHECKING:
    from atroposlib.api.service import TrajectoryService

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_env = {"labelnames": ("env",), "registry": self.registry}
        self._groups_in = Counter("atropos_groups_received", "Groups stored.", **of_env)
        self._sequences_in = Counter("atropos_sequences_received", "Sequences stored.", **of_env)
        self._bytes_in = Counter("atropos_bytes_received", "Bytes of stored groups.", registry=self.registry)
        self._groups_out = Counter("atropos_groups_delivered", "Groups sent to trainers.", **of_env)
        self._batches_out = Counter("atropos_batches_delivered", "Batches sent to trainers.", registry=self.registry)
        self._requests = Histogram(
            "atropos_request_seconds",
            "Time from request to answer.",
            ("route", "status"),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def watch(self, service: "TrajectoryService") -> None:
        """Report the state of this service at every scrape."""
        self.registry.register(_State(service))

    def group_stored(self, group: Group) -> None:
        """A group is on disk."""
        env = _env_label(group)
        self._groups_in.labels(env).inc()
        self._sequences_in.labels(env).inc(group.sequences)
        self._bytes_in.inc(group.size)

    def batch_sent(self, groups: Sequence[Group]) -> None:
        """A batch left for a trainer."""
        self._batches_out.inc()
        for group in groups:
            self._groups_out.labels(_env_label(group)).inc()

    def request_done(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(route, str(status)).observe(seconds)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _State(Collector):
    """Gauges read from the service when asked."""

    def __init__(self, service: "TrajectoryService") -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        return self._gauges()

    def describe(self) -> Iterable[Metric]:
        return []

    def _gauges(self) -> Iterator[Metric]:
        service = self._service
        queue = service.queue
        yield _gauge("atropos_step", "Batches delivered, from the trainer's starting step on.", service.run.step)
        yield _gauge("atropos_queue_groups", "Groups that wait.", len(queue.pool))
        yield _gauge("atropos_queue_sequences", "Sequences that wait.", queue.pool.sequences)
        yield _gauge("atropos_leased_batches", "Batches on lease.", len(queue.leased))
        yield _gauge("atropos_returned_batches", "Formed batches that came back.", len(queue.returned))
        yield _gauge("atropos_store_bytes", "Bytes that stored groups take.", service.store.bytes_used())
        full = service.store.why_full() is not None
        yield _gauge("atropos_storage_full", "1 while groups are refused for want of room.", full)
        per_env = GaugeMetricFamily(
            "atropos_env_queue_sequences", "Sequences that wait, per environment.", labels=["env"]
        )
        silent = GaugeMetricFamily("atropos_env_silent_seconds", "Since the environment was heard of.", labels=["env"])
        for env_id, sequences in queue.pool.sequences_by_env().items():
            per_env.add_metric([str(env_id)], sequences)
        for env in service.run.envs:
            if env.connected:
                silent.add_metric([str(env.env_id)], service.liveness.silent_s(env.env_id))
        yield per_env
        yield silent


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _env_label(group: Group) -> str:
    return "none" if group.env_id is None else str(group.env_id)
