"""Attention of a ragged pass: each segment's new rows over its own cached keys, without padding.

Two ways of doing the same sum. *Row by row*, for rows whose logits are wanted: every row is one
item of a batched product over whole blocks of keys, whose shape depends on the row's position
alone. So a row's result has the same bits whether it is processed alone or with seven others.
*As a block*, for the long part of a prompt: one product for many rows, much faster, cut at places
that do not depend on drafting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from anydraft.backends.torch_cache import BLOCK, SequenceCache


@dataclass(frozen=True, slots=True)
class Segment:
    """New rows of one sequence inside a pass."""

    cache: SequenceCache
    start: int
    """Absolute position of the first row; all before it are in the cache."""
    first: int
    """Index of the first row in the pass."""
    rows: int
    by_row: bool
    """Row by row (same bits at any width), else as a block."""

    @property
    def end(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that see the same blocks of keys."""

    segment: Segment
    rows: slice
    """In the pass."""
    keys: slice
    """In the cache; a superset of what the rows see, cut to size by the mask."""
    mask: Tensor
    """(rows, keys), 0 or -inf, in the queries' dtype."""
    count: int


@dataclass(slots=True)
class Pass:
    """One run through the layers over the concatenated rows of several segments."""

    segments: list[Segment]
    dtype: torch.dtype
    device: torch.device
    _groups: dict[int | None, list[_Group]] = field(default_factory=dict)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values, (rows, heads, dim), into each segment's own cache."""
        for s in self.segments:
            rows = slice(s.first, s.first + s.rows)
            s.cache.keys[layer][:, s.start : s.end].copy_(keys[rows].transpose(0, 1))
            s.cache.values[layer][:, s.start : s.end].copy_(values[rows].transpose(0, 1))

    def attend(
        self,
        layer: int,
        queries: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(rows, query heads, key_dim) -> (rows, query heads, value_dim).

        Args:
            window: how many positions a row sees, itself included; None for all.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: (query heads,) an extra score per head that takes weight and gives nothing.
        """
        groups = self._groups.get(window)
        if groups is None:
            groups = self._groups[window] = self._plan(window)
        plain = softcap is None and sinks is None
        parts = []
        for group in groups:
            cache = group.segment.cache
            keys, values = cache.keys[layer][:, group.keys], cache.values[layer][:, group.keys]
            rows = queries[group.rows]
            if plain and group.segment.by_row:
                parts.append(_rows(rows, keys, values, group.mask, scale))
            elif plain:
                parts.append(_block(rows, keys, values, group.mask, scale))
            else:
                step = 1 if group.segment.by_row else group.count
                parts += [
                    _spelled_out(
                        rows[i : i + step], keys, values, group.mask[i : i + step],
                        scale, softcap, sinks,
                    )
                    for i in range(0, group.count, step)
                ]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plan(self, window: int | None) -> list[_Group]:
        groups = []
        for s in self.segments:
            spans: list[tuple[int, int, slice]]
            if s.by_row:
                spans = _spans_by_row(s, window)
            else:
                low = 0 if window is None else max(0, s.start - window + 1)
                spans = [(s.start, s.end, slice(low, s.end))]
            for start, end, keys in spans:
                rows = slice(s.first + start - s.start, s.first + end - s.start)
                mask = self._mask(start, end, keys, window)
                groups.append(_Group(s, rows, keys, mask, end - start))
        return groups

    def _mask(self, start: int, end: int, keys: slice, window: int | None) -> Tensor:
        row = torch.arange(start, end, device=self.device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=self.device)[None]
        hidden = key > row
        if window is not None:
            hidden |= key <= row - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _spans_by_row(s: Segment, window: int | None) -> list[tuple[int, int, slice]]:
    """Runs of rows that see the same whole blocks: a function of their positions alone."""
    spans: list[tuple[int, int, slice]] = []
    for position in range(s.start, s.end):
        low = 0 if window is None else max(0, position - window + 1) // BLOCK * BLOCK
        keys = slice(low, (position // BLOCK + 1) * BLOCK)
        if spans and spans[-1][2] == keys:
            spans[-1] = (spans[-1][0], position + 1, keys)
        else:
            spans.append((position, position + 1, keys))
    return spans


def _rows(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Each row its own batch item; the query heads that share a key head are its query length."""
    count, heads, dim = queries.shape
    shared = keys.shape[0]
    out = F.scaled_dot_product_attention(
        queries.reshape(count, shared, heads // shared, dim),
        keys.expand(count, *keys.shape),
        values.expand(count, *values.shape),
        attn_mask=mask[:, None, None],
        scale=scale,
    )
    return out.reshape(count, heads, values.shape[-1])


def _block(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """All rows at once; the query heads that share a key head are batch items."""
    count, heads, dim = queries.shape
    shared = keys.shape[0]
    each = heads // shared
    out = F.scaled_dot_product_attention(
        queries.reshape(count, shared, each, dim).permute(2, 1, 0, 3),
        keys.expand(each, *keys.shape),
        values.expand(each, *values.shape),
        attn_mask=mask[None, None],
        scale=scale,
    )
    return out.permute(2, 1, 0, 3).reshape(count, heads, values.shape[-1])


def _spelled_out(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with what SDPA lacks: capped scores and sinks."""
    count, heads, _ = queries.shape
    each = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(each, 0), values.repeat_interleave(each, 0)
    scores = torch.matmul(queries.transpose(0, 1), keys.transpose(1, 2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(-1, 1, 1).expand(heads, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[1]], values).transpose(0, 1)
