"""Endpoints where the user named none: inference nodes of a SLURM job, or local ports.

Reads `SLURM_JOB_NODELIST`, `NUM_TRAINING_NODES` (leading nodes that train, default 0) and `INFER_TP` (GPUs per
server, default 1). Each inference node has 8 GPUs, so it runs 8 / INFER_TP servers from port 9000 on.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping

from atroposlib.errors import ConfigError

GPUS_PER_NODE = 8
FIRST_SLURM_PORT = 9000
LOCAL_PORTS = range(9004, 9008)
LOCAL_API_KEY = "x"


def local_base_urls() -> list[str]:
    """The endpoints on this machine."""
    return [f"http://localhost:{port}/v1" for port in LOCAL_PORTS]


def slurm_base_urls(environ: Mapping[str, str]) -> list[str]:
    """Endpoints on the job's inference nodes; [] outside SLURM and on jobs of fewer than two nodes.

    Raises:
        ConfigError: INFER_TP or NUM_TRAINING_NODES makes no sense, or leaves no server.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    nodes = expand_nodelist(nodelist) if nodelist else []
    if len(nodes) < 2:
        return []
    training = _whole_number(environ, "NUM_TRAINING_NODES", 0)
    gpus_per_server = max(1, _whole_number(environ, "INFER_TP", 1))
    servers_per_node = GPUS_PER_NODE // gpus_per_server
    urls = [
        f"http://{node}:{FIRST_SLURM_PORT + offset}/v1"
        for node in nodes[training:]
        for offset in range(servers_per_node)
    ]
    if not urls:
        raise ConfigError(
            f"no inference server is left: {len(nodes)} nodes, NUM_TRAINING_NODES={training}, "
            f"INFER_TP={gpus_per_server} (at most {GPUS_PER_NODE}); lower one of the two"
        )
    return urls


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a SLURM node list, by `scontrol` where there is one (containers often lack it).

    >>> expand_nodelist("gpu[01-03,7],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']
    """
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return _expand(nodelist)
    listed = subprocess.run([scontrol, "show", "hostnames", nodelist], capture_output=True, text=True, timeout=30)
    if listed.returncode != 0:
        raise ConfigError(f"scontrol cannot expand SLURM_JOB_NODELIST={nodelist!r}: {listed.stderr.strip()}")
    return listed.stdout.split()


def _expand(nodelist: str) -> list[str]:
    hosts: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?[^,\[\]]*", nodelist):
        match = re.fullmatch(r"([^\[]+)\[([^\]]+)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        head, ranges, tail = match.groups()
        for span in ranges.split(","):
            first, _, last = span.partition("-")
            hosts += [f"{head}{i:0{len(first)}}{tail}" for i in range(int(first), int(last or first) + 1)]
    return hosts


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}; it must be a whole number")
    return int(text)
