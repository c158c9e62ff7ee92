"""Weights handed over in GPU memory: an engine on the same host maps them, and only CUDA's handles travel."""

import base64
import io
import json
import pickle
import subprocess
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.policy import Policy
from atroposlib.type_definitions import JsonObject

Views = dict[str, Tensor]
"""Weights by name."""
_ALIGNED = 128
"""Values between two starts of weights: 256 bytes in bfloat16, as CUDA's allocator aligns."""
_DEVICE = 6
"""Argument of torch's `rebuild_cuda_tensor` that holds the device's number."""


class SharedWeights:
    """A copy of the policy's weights in the compute dtype, in one block of GPU memory that stays where it is.

    `places` says where, as `describe` puts it for one kind of engine. It is made once: torch keeps all handles that it
    makes until the process ends.

    Raises:
        ConfigError: the policy is not on a GPU, or its weights have other names in its folder, which engines expect.
    """

    def __init__(self, policy: Policy, describe: Callable[[Views], Any]) -> None:
        if policy.device.type != "cuda":
            raise ConfigError(f"sync_from is 'gpu' but the policy is on {policy.device}; set sync_from to 'disk'")
        self._device = policy.device
        named = dict(policy.model.named_parameters())
        unknown = named.keys() - saved_names(Path(policy.folder))
        if unknown:
            raise ConfigError(
                f"{len(unknown)} weights such as {min(unknown)!r} have other names in {policy.folder}; an engine would "
                "not know them: set sync_from to 'disk'"
            )
        starts = [0]
        for value in named.values():
            starts.append(starts[-1] + -(-value.numel() // _ALIGNED) * _ALIGNED)
        block = torch.empty(starts[-1], dtype=policy.dtype, device=policy.device)
        self._views = {
            name: block[start : start + value.numel()].view(value.shape)
            for (name, value), start in zip(named.items(), starts, strict=False)
        }
        self.places = describe(self._views)

    def copy(self, policy: Policy) -> None:
        """Copy the weights as they are now; engines must have answered before the next call."""
        for name, value in policy.model.named_parameters():
            self._views[name].copy_(value.detach())
        torch.cuda.synchronize(self._device)


def for_sglang(views: Views) -> str:
    """Return where weights are, as SGLang's `/update_weights_from_tensor` takes it."""
    stream = io.BytesIO()
    _Pickler(stream).dump(list(views.items()))
    return base64.b64encode(stream.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Name GPUs by their UUID, which SGLang looks up: their numbers differ between processes that see other GPUs."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        device = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


def for_vllm(views: Views) -> JsonObject:
    """Return where weights are, as vLLM's `/update_weights` takes it: the same for each GPU on which it may run.

    No event of CUDA need be waited for, as an engine hears of weights that are copied.
    """
    gpus = _host_gpus()
    handles = [dict.fromkeys(gpus, (*reductions.reduce_tensor(view)[1][:-1], False)) for view in views.values()]
    return {
        "names": list(views),
        "dtype_names": [str(view.dtype).removeprefix("torch.") for view in views.values()],
        "shapes": [list(view.shape) for view in views.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


def _host_gpus() -> list[str]:
    """Return the UUIDs of the host's GPUs, also of those that CUDA_VISIBLE_DEVICES hides from this process."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # not in every container
        return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    return [line.removeprefix("GPU-") for line in told.split()]


def saved_names(folder: Path) -> set[str]:
    """Return the names of the weights in a model's folder."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    with safe_open(folder / "model.safetensors", "pt") as weights:  # pyright: ignore[reportGeneralTypeIssues]
        return set(weights.keys())
