"""One sequence's keys and values: preallocated, grown by doubling, cut back exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Attention reads keys in whole blocks of this many positions; capacities are multiples of it."""
FIRST_CAPACITY = 256


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per position."""

    heads: int
    key_dim: int
    value_dim: int


class SequenceCache:
    """Keys and values of one sequence, for all layers, *all* positions of sliding layers included.

    `keys[l]` is (heads, capacity, key_dim), `values[l]` (heads, capacity, value_dim). Positions
    that were never written, and those cut off, hold zeros: attention multiplies masked values by
    zero, which must not meet a NaN.
    """

    def __init__(
        self, shapes: list[LayerShape], dtype: torch.dtype, device: torch.device, limit: int | None
    ) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.limit = limit
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._storage: list[Tensor] = []
        # Layers of one shape share a tensor, so that growing and cutting are one operation.
        self._uniform = len(set(shapes)) == 1 and shapes[0].key_dim == shapes[0].value_dim

    def reserve(self, length: int) -> None:
        """Make room for `length` positions; keeps what is there. No effect if it fails."""
        if length <= self.capacity:
            return
        capacity = max(self.capacity * 2, FIRST_CAPACITY)
        while capacity < length:
            capacity *= 2
        if self.limit is not None:  # no more than the model can use, in whole blocks
            capacity = min(
                capacity, max(-(-self.limit // BLOCK) * BLOCK, -(-length // BLOCK) * BLOCK)
            )
        storage = [
            torch.zeros(shape, dtype=self.dtype, device=self.device)
            for shape in self._storage_shapes(capacity)
        ]
        for new, old in zip(storage, self._storage, strict=False):
            new[..., : self.capacity, :].copy_(old)
        self._adopt(storage, capacity)

    def cut(self, length: int, used: int) -> None:
        """Forget positions length..used (they become zeros)."""
        if used > length:
            for tensor in self._storage:
                tensor[..., length:used, :].zero_()

    @property
    def uniform(self) -> bool:
        """Whether all layers have one shape, with values as wide as keys."""
        return self._uniform

    def joined(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Per layer a view (positions, 2 * heads, dim): keys' heads, then values'. Uniform only."""
        return self._storage[0][..., start:end, :].flatten(1, 2).transpose(1, 2).unbind(0)

    def spread(self, span: slice, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Per layer, keys and values as (count, heads, span, dim), the same for each of `count`."""
        if self._uniform:  # two operations for all layers, instead of four for each
            both = self._storage[0][..., span, :].unsqueeze(2)
            both = both.expand(-1, -1, count, -1, -1, -1)
            return both[:, 0].unbind(0), both[:, 1].unbind(0)
        keys = [k[:, span].expand(count, -1, -1, -1) for k in self.keys]
        return keys, [v[:, span].expand(count, -1, -1, -1) for v in self.values]

    def free(self) -> None:
        """Drop the memory."""
        self._storage, self.keys, self.values, self.capacity = [], [], [], 0

    def _storage_shapes(self, capacity: int) -> list[tuple[int, ...]]:
        if self._uniform:
            shape = self.shapes[0]
            return [(len(self.shapes), 2, shape.heads, capacity, shape.key_dim)]
        return [
            (shape.heads, capacity, dim)
            for shape in self.shapes
            for dim in (shape.key_dim, shape.value_dim)
        ]

    def _adopt(self, storage: list[Tensor], capacity: int) -> None:
        if self._uniform:
            layers = storage[0].unbind(0)
            keys, values = [layer[0] for layer in layers], [layer[1] for layer in layers]
        else:
            keys, values = storage[0::2], storage[1::2]
        self._storage, self.keys, self.values, self.capacity = storage, keys, values, capacity
