"""What can be known to go wrong with an engine without starting it and without a GPU."""

import ast
import importlib.util
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from atroposlib.envs.server_handling.discovery import GPUS_PER_NODE
from atroposlib.launch.config import DatagenConfig, EngineConfig
from atroposlib.launch.engine_plan import engine_urls

_PACKAGES = {"embedded": ("xllamacpp", "local"), "sglang": ("sglang", "sglang")}
_ATTENTION = (
    "triton torch_native flex_attention dsa nsa dsv4 compressed cutlass_mla fa3 fa4 flashinfer flashmla trtllm_mla "
    "cutedsl_mla tokenspeed_mla trtllm_mha dual_chunk_flash_attn hpc_ops minicpm_flashattn minicpm_flashinfer aiter "
    "wave intel_amx ascend intel_xpu"
)
_CHOICES = {
    "--attention-backend": ("ATTENTION_BACKEND_CHOICES", _ATTENTION.split()),
    "--grammar-backend": ("GRAMMAR_BACKEND_CHOICES", ["xgrammar", "outlines", "llguidance", "none"]),
}
"""Flags with the list in SGLang's `server_args.py` that holds their values, and what it held in 2026."""


def engine_problems(config: DatagenConfig, environ: Mapping[str, str], *, starts: bool) -> list[str]:
    """Sentences about the engine's settings, its package and its GPUs.

    Args:
        starts: the run begins here and now; else GPUs are only looked at where there are some.
    """
    engine = config.engine
    if engine.kind == "external":
        missing = "engine.kind is external but engine.base_url is not set; give the address of the running engine"
        return [] if engine.base_url else [missing]
    problems = []
    module, extra = _PACKAGES[engine.kind]
    if importlib.util.find_spec(module) is None:
        problems.append(f"engine.kind {engine.kind} needs the package {module}; run: pip install 'atroposlib[{extra}]'")
    if engine.kind == "embedded":
        return problems
    problems += _choice_problems(engine.args)
    if engine_urls(config, environ):
        return [*problems, *_node_problems(engine, environ)]
    return [*problems, *(_gpu_problems(engine, environ) if starts or gpu_count(environ) else [])]


def gpu_count(environ: Mapping[str, str]) -> int:
    """GPUs that this process may use: those named in CUDA_VISIBLE_DEVICES, else those of the machine."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in {"", "-1"}])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _gpu_problems(engine: EngineConfig, environ: Mapping[str, str]) -> list[str]:
    needed, found = engine.tp * engine.dp, gpu_count(environ)
    if found >= needed:
        return []
    return [
        f"engine.tp {engine.tp} x engine.dp {engine.dp} needs {needed} GPUs, but {found} are visible here "
        f"(CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); ask for more or lower tp or dp"
    ]


def _node_problems(engine: EngineConfig, environ: Mapping[str, str]) -> list[str]:
    """On several nodes the addresses come from INFER_TP, so it must be what one server takes."""
    needed = engine.tp * engine.dp
    told = int(environ.get("INFER_TP") or needed)
    problems = []
    if needed != told:
        problems.append(
            f"this job has several nodes and INFER_TP is {told}, but engine.tp {engine.tp} x engine.dp {engine.dp} is "
            f"{needed} GPUs for each server; set INFER_TP={needed}"
        )
    if needed > GPUS_PER_NODE:
        problems.append(f"one server needs {needed} GPUs, but a node has {GPUS_PER_NODE}; lower engine.tp or engine.dp")
    if engine.router and importlib.util.find_spec("sglang_router") is None:
        problems.append("engine.router needs the package sglang_router; run: pip install sglang-router")
    return problems


def _choice_problems(args: list[str]) -> list[str]:
    """Backends that SGLang does not know: it would only say so after a minute of imports."""
    words = [part for word in args for part in word.split("=", 1)]
    given = {flag: value for flag, value in pairwise(words) if flag in _CHOICES}
    problems = []
    for flag, value in given.items():
        variable, usual = _CHOICES[flag]
        known = _installed_choices(variable) or usual
        if value not in known:
            problems.append(f"engine.args has {flag} {value}, which SGLang does not know; it takes {', '.join(known)}")
    return problems


def _installed_choices(variable: str) -> list[str]:
    """A list of names in the source of the installed SGLang, which is not imported; [] without one."""
    spec = importlib.util.find_spec("sglang")
    for folder in (spec and spec.submodule_search_locations) or []:
        source = Path(folder, "srt", "server_args.py")
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
                continue
            if [target.id for target in node.targets if isinstance(target, ast.Name)] == [variable]:
                return [str(item.value) for item in node.value.elts if isinstance(item, ast.Constant)]
    return []
