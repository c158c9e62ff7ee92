"""Weights handed over in GPU memory: an engine on the same host maps them, and only CUDA's handles travel."""

import base64
import io
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.policy import Policy

_ALIGNED = 128
"""Values between two starts of weights: 256 bytes in bfloat16, as CUDA's allocator aligns."""
_DEVICE = 6
"""Argument of torch's `rebuild_cuda_tensor` that holds the device's number."""


class SharedWeights:
    """A copy of the policy's weights in the compute dtype, in one block of GPU memory that stays where it is.

    Raises:
        ConfigError: the policy is not on a GPU, or its weights have other names in its folder, which engines expect.
    """

    def __init__(self, policy: Policy) -> None:
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

    def message(self, policy: Policy) -> str:
        """Copy the weights as they are now; return where they are, as SGLang's `/update_weights_from_tensor` takes it.

        The engine must have answered before the next call.
        """
        for name, value in policy.model.named_parameters():
            self._views[name].copy_(value.detach())
        torch.cuda.synchronize(self._device)
        stream = io.BytesIO()
        _Pickler(stream).dump(list(self._views.items()))
        return base64.b64encode(stream.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Name GPUs by their UUID, which SGLang looks up: their numbers differ between processes that see other GPUs."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        device = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


def saved_names(folder: Path) -> set[str]:
    """Return the names of the weights in a model's folder."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    with safe_open(folder / "model.safetensors", "pt") as weights:  # pyright: ignore[reportGeneralTypeIssues]
        return set(weights.keys())
