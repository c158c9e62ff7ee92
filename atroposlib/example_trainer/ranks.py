"""Several processes that train the same weights, each on its share of a step's micro-batches.

    accelerate launch --num_processes 4 -m atroposlib.example_trainer.grpo --config RECIPE

Every process holds the whole model. The first one talks to API, engine and disk; the others get its batches. Alone, all
of this does nothing.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""How long a process waits for the others. They wait while the first one waits for a batch, so torch's 10 minutes are
too short; a process that died ends the others at once, through the launcher."""


class Ranks:
    """This process among `size`; `is_first` is the one that talks to the world."""

    def __init__(self, device: torch.device) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        if self.size > 1:
            from accelerate import PartialState

            PartialState(cpu=device.type == "cpu", timeout=_PATIENCE)

    @property
    def is_first(self) -> bool:
        """True alone, too."""
        return self.rank == 0

    def mine(self, index: int) -> bool:
        """Is the micro-batch with this number ours?"""
        return index % self.size == self.rank

    def share(self, value: T) -> T:
        """The first process's value, in every process; must be called by all."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        holder = [value]
        broadcast_object_list(holder, from_process=0)
        return holder[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in order of rank."""
        if self.size == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all processes; a process without one counts as zeros."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
