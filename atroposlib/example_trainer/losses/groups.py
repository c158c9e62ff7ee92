"""Which rows of a batch belong to the same prompt, and the segment operations on them. Groups may be ragged."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Row i belongs to group `ids[i]`; ids are 0..count-1 and each occurs at least once."""

    ids: Tensor  # [B] int64
    count: int

    @classmethod
    def of(cls, labels: Tensor) -> "Groups":
        """Number arbitrary integer labels [B] in ascending order."""
        unique, ids = torch.unique(labels, return_inverse=True)
        return cls(ids, len(unique))

    @classmethod
    def contiguous(cls, rows: int, size: int) -> "Groups":
        """Rows 0..size-1 are the first group, and so on.

        Raises:
            ValueError: `rows` is not a multiple of `size`.
        """
        if size < 1 or rows % size:
            raise ValueError(f"{rows} rows do not make whole groups of {size}")
        return cls(torch.arange(rows) // size, rows // size)

    def spread(self, per_group: Tensor) -> Tensor:
        """[n] -> [B]: each row gets its group's value."""
        return per_group[self.ids]

    def sum(self, values: Tensor) -> Tensor:
        """[B] -> [n]."""
        return values.new_zeros(self.count).index_add(0, self.ids, values)

    def sizes(self, like: Tensor) -> Tensor:
        """[n] rows per group, in the dtype of `like`."""
        return self.sum(torch.ones_like(like))

    def mean(self, values: Tensor) -> Tensor:
        """[B] -> [n]."""
        return self.sum(values) / self.sizes(values)

    def std(self, values: Tensor, ddof: int = 0) -> Tensor:
        """[B] -> [n]; 0 for groups of at most `ddof` rows."""
        squares = self.sum((values - self.spread(self.mean(values))) ** 2)
        return (squares / (self.sizes(values) - ddof).clamp(min=1)).sqrt()

    def max(self, values: Tensor) -> Tensor:
        """[B] -> [n]."""
        return values.new_full((self.count,), -torch.inf).scatter_reduce(0, self.ids, values, "amax")

    def is_constant(self, values: Tensor) -> Tensor:
        """[B] -> [n] bool: every row of the group has exactly the same value."""
        return self.max(values) == -self.max(-values)

    def softmax(self, logits: Tensor) -> Tensor:
        """[B] -> [B], adding up to 1 within each group; rows at -inf get 0, a group of only those is all 0."""
        top = self.max(logits)
        shifted = (logits - self.spread(torch.where(top.isfinite(), top, 0.0))).exp()
        return shifted / self.spread(self.sum(shifted)).clamp(min=torch.finfo(logits.dtype).tiny)
