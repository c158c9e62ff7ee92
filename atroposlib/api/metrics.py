"""Numbers for Prometheus: what came in, what went out, what waits, how long requests took."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from atroposlib.api.queue import Group

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

    def group_stored(self, group: Group) -> None:
        env = _env_label(group)
        self._groups_in.labels(env).inc()
        self._sequences_in.labels(env).inc(group.sequences)
        self._bytes_in.inc(group.size)

    def batch_sent(self, groups: Sequence[Group]) -> None:
        self._batches_out.inc()
        for group in groups:
            self._groups_out.labels(_env_label(group)).inc()

    def request_done(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def _env_label(group: Group) -> str:
    return "none" if group.env_id is None else str(group.env_id)
