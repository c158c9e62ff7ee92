"""Common to the services of every run: free ports, readiness probes, the trajectory API, the environment."""

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from atroposlib.launch.services import Probe, Service
from atroposlib.status.runs import read_json

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
_HIGHEST_PORT = 65_535 - 10_000


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses; all are held at once, so none comes twice.

    None is above 55,535: SGLang takes the one 10,000 above its own too, and does not start where there is none.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            probe = stack.enter_context(contextlib.closing(socket.socket()))
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port <= _HIGHEST_PORT:
                ports.append(port)
    return ports


def answers(session: aiohttp.ClientSession, method: str, url: str, body: object = None) -> Probe:
    """True when the request is answered with 200."""

    async def probe(pid: int) -> bool:
        try:
            async with session.request(method, url, json=body, timeout=_PROBE_TIMEOUT) as reply:
                await reply.read()
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    return probe


async def at_once(pid: int) -> bool:
    """Ready as soon as it runs."""
    return True


def trajectory_api(run_dir: Path, port: int, session: aiohttp.ClientSession, *, logs: Path | None = None) -> Service:
    """`run-api` with its state in the run's folder, and its log too unless `logs` names another."""
    health = answers(session, "GET", f"http://127.0.0.1:{port}/health")
    where = ["--host", "127.0.0.1", "--port", str(port), "--state-dir", str(run_dir / "api")]
    command = [sys.executable, "-m", "atroposlib.cli.run_api", *where]
    log = (logs or run_dir / "logs") / "api.log"
    return Service("api", command, log, ready=health, healthy=health, ready_timeout_s=60)


def environment(
    script: Path, settings: Path, log: Path, progress: Path, hang_s: float | None, flags: Sequence[str] = ()
) -> Service:
    """An environment's file in `serve` mode; killed and started again after `hang_s` without a sign of life.

    Args:
        settings: its YAML, which names `progress`, the file where it says how far it is.
        flags: what wins over that.
    """
    return Service(
        "environment",
        [sys.executable, str(script), "serve", "--config", str(settings), *flags],
        log,
        ready=_reports(progress),
        ready_timeout_s=600,
        healthy=_goes_on(progress, hang_s) if hang_s else None,
        is_job=True,
        achieved=lambda: (read_json(progress) or {}).get("groups_done", 0),
    )


def _reports(progress: Path) -> Probe:
    """True when the progress file is the running process's own."""

    async def probe(pid: int) -> bool:
        return (read_json(progress) or {}).get("pid") == pid

    return probe


def _goes_on(progress: Path, hang_s: float) -> Probe:
    """False when a process that rolls out has not touched its progress file for so long: its event loop hangs."""

    async def probe(pid: int) -> bool:
        said = read_json(progress) or {}
        if said.get("state") not in ("running", "parked"):
            return True  # set-up and the reports at the end may take any time
        seen = said.get("updated_at", 0.0)  # by this machine's clock, which a file server's need not follow
        with contextlib.suppress(OSError):
            seen = max(seen, progress.stat().st_mtime)  # alone touched while the disk is full
        return time.time() - seen < hang_s

    return probe
