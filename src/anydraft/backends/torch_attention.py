"""Attention of a ragged pass: each segment's new rows over its own cached keys, without padding.

Two ways of doing the same sum. *Row by row*, for rows whose logits are wanted: every row is one
item of a batched product over whole blocks of keys, whose shape depends on the row's position
alone. So a row's result has the same bits whether it is processed alone or with seven others.
*As a block*, for the long part of a prompt: one product for many rows, much faster, cut at places
that do not depend on drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    wide: Tensor
    """The mask as attention takes it, with four dimensions."""
    count: int
    spread: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=dict)
    """Views of keys and values, by how often they are repeated."""

    def views(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (count, heads, keys, dim)."""
        found = self.spread.get(count)
        if found is None:
            found = self.spread[count] = self.segment.cache.spread(self.keys, count)
        return found[0][layer], found[1][layer]


@dataclass(slots=True)
class Pass:
    """One run through the layers over the concatenated rows of several segments."""

    segments: list[Segment]
    dtype: torch.dtype
    device: torch.device
    _groups: dict[int | None, list[_Group]] = field(default_factory=dict)
    _joined: list[tuple[slice, tuple[Tensor, ...]]] = field(default_factory=list)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values, (rows, heads, dim), into each segment's own cache."""
        for s in self.segments:
            rows = slice(s.first, s.first + s.rows)
            s.cache.keys[layer][:, s.start : s.end].copy_(keys[rows].transpose(0, 1))
            s.cache.values[layer][:, s.start : s.end].copy_(values[rows].transpose(0, 1))

    def write_joined(self, layer: int, both: Tensor) -> None:
        """The same with keys and values side by side, (rows, 2 * heads, dim); uniform caches."""
        if not self._joined:
            self._joined = [
                (slice(s.first, s.first + s.rows), s.cache.joined(s.start, s.end))
                for s in self.segments
            ]
        if len(self._joined) == 1:
            self._joined[0][1][layer].copy_(both)
            return
        for rows, views in self._joined:
            views[layer].copy_(both[rows])

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
        groups = self.groups(window)
        alone = len(groups) == 1
        parts = []
        for group in groups:
            rows = queries if alone else queries[group.rows]
            if softcap is not None or sinks is not None:
                parts += _spelled_out(group, layer, rows, scale, softcap, sinks)
            elif group.segment.by_row:
                parts.append(_rows(group, layer, rows, scale))
            else:
                parts.append(_block(group, layer, rows, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def groups(self, window: int | None) -> list[_Group]:
        """Rows that see the same keys, for layers with this window."""
        found = self._groups.get(window)
        if found is None:
            found = self._groups[window] = self._plan(window)
        return found

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
                wide = mask[:, None, None] if s.by_row else mask[None, None]
                groups.append(_Group(s, rows, keys, mask, wide, end - start))
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


def _rows(group: _Group, layer: int, queries: Tensor, scale: float) -> Tensor:
    """Each row its own batch item; the query heads that share a key head are its query length."""
    count, heads, dim = queries.shape
    keys, values = group.views(layer, count)
    shared = keys.shape[1]
    out = _attention(
        queries.view(count, shared, heads // shared, dim),
        keys,
        values,
        group.wide,
        scale,
    )
    return out.reshape(count, heads, values.shape[-1])


def _block(group: _Group, layer: int, queries: Tensor, scale: float) -> Tensor:
    """All rows at once; the query heads that share a key head are batch items."""
    count, heads, dim = queries.shape
    shared = group.segment.cache.shapes[layer].heads
    each = heads // shared
    keys, values = group.views(layer, each)
    grouped = queries.view(count, shared, each, dim).permute(2, 1, 0, 3)
    out = _attention(grouped, keys, values, group.wide, scale)
    return out.permute(2, 1, 0, 3).reshape(count, heads, values.shape[-1])


def _attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(batch, heads, rows, dim) each; mask broadcasts to (batch, heads, rows, keys)."""
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        # What SDPA calls in the end: choosing costs as much as a small model's attention itself.
        out: Tensor = _cpu_flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)[0]
        return out
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _spelled_out(
    group: _Group,
    layer: int,
    queries: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """The same with what SDPA lacks, capped scores and sinks; parts of rows, in order."""
    count, heads, _ = queries.shape
    keys, values = group.views(layer, 1)
    each = heads // keys.shape[1]
    keys, values = keys[0].repeat_interleave(each, 0), values[0].repeat_interleave(each, 0)
    step = 1 if group.segment.by_row else count
    parts = []
    for first in range(0, count, step):
        rows = queries[first : first + step].transpose(0, 1)
        scores = torch.matmul(rows, keys.transpose(1, 2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + group.mask[first : first + step]
        if sinks is not None:
            sink = sinks.reshape(-1, 1, 1).expand(heads, rows.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        parts.append(torch.matmul(weights[..., : keys.shape[1]], values).transpose(0, 1))
    return parts
