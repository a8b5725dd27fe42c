"""How an extension is cut into passes: a function of positions, never of what was drafted.

Rows whose logits are wanted, and short runs before them, go row by row. The rest of a long prompt
goes in blocks that end at fixed absolute positions, so memory stays bounded and a prompt is
processed the same way whether or not drafted tokens follow it in the same extension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anydraft.backends.torch_attention import Segment

CHUNK = 256
"""Blocks of a long prompt end at multiples of this."""
SHORT = 32
"""Up to so many rows without logits go row by row."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive new positions of one extension that go through one pass."""

    index: int
    """Of the extension in its batch."""
    start: int
    end: int
    """Absolute positions."""
    num_logits: int
    by_row: bool


class LengthRope:
    """Rotary embeddings whose frequencies depend on how long the sequence is.

    `longrope` has one set of frequencies up to a length and another beyond, and the stock modules
    choose by the highest position in a pass: no pass may straddle the switch. `dynamic` computes
    new ones for every length beyond: there a pass is one row of one state.
    """

    def __init__(self, model: Any) -> None:
        """`model` is the modules that run, or None where no frequency depends on length."""
        self.switch: int | None = None
        self.alone = False
        """Beyond the switch every row is a pass of its own."""
        self._dynamic: list[Any] = []
        for module in () if model is None else model.modules():
            kind = getattr(module, "rope_type", None)
            kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
            if "longrope" in kinds:
                parameters = module.config.rope_parameters
                nested = parameters.values() if isinstance(kind, dict) else [parameters]
                self.switch = min(
                    int(p["original_max_position_embeddings"])
                    for p in nested
                    if p.get("rope_type") == "longrope"
                )
            elif "dynamic" in kinds:
                self.switch = int(module.original_max_seq_len)
                self.alone = True
                self._dynamic.append(module)

    def beyond(self, position: int) -> bool:
        """Whether a pass that ends at `position` uses the other frequencies."""
        return self.switch is not None and position >= self.switch

    def prepare(self) -> None:
        """Forget the longest sequence seen: a pass takes its frequencies from its own length."""
        for module in self._dynamic:
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name.endswith("original_inv_freq"):
                    setattr(module, name.replace("original_", ""), buffer.clone())
            for name in [n for n in vars(module) if n.endswith("max_seq_len_cached")]:
                setattr(module, name, module.original_max_seq_len)


def cut_pieces(
    index: int, length: int, count: int, num_logits: int, most_rows: int, rope: LengthRope
) -> list[Piece]:
    """Cut `count` new positions after `length`, of which the last `num_logits` need logits."""
    end, wanted = length + count, length + count - num_logits
    pieces: list[Piece] = []
    position = length
    by_block = wanted - length > SHORT
    while position < end:
        in_block = by_block and position < wanted
        if in_block:
            stop = min(wanted, (position // CHUNK + 1) * CHUNK)
        else:
            stop = min(end, position + most_rows)
        if rope.switch is not None:
            if position < rope.switch < stop:
                stop = rope.switch
            elif rope.alone and rope.beyond(position):
                stop = position + 1
        pieces.append(
            Piece(index, position, stop, max(0, stop - max(position, wanted)), not in_block)
        )
        position = stop
    return pieces


def group_passes(
    pieces: Sequence[Sequence[Piece]], most_rows: int, rope: LengthRope
) -> Iterator[list[Piece]]:
    """Passes in order: blocks alone, row-by-row pieces of several extensions together."""
    left = [list(own) for own in pieces]
    for own in left:
        while own and not own[0].by_row:
            yield [own.pop(0)]
    while any(left):
        group: list[Piece] = []
        rows = 0
        for own in left:
            if not own:
                continue
            piece = own[0]
            size = piece.end - piece.start
            beyond = rope.beyond(piece.start)
            apart = group and (
                rows + size > most_rows
                or beyond != rope.beyond(group[0].start)
                or (beyond and rope.alone)
            )
            if not apart:
                group.append(own.pop(0))
                rows += size
        yield group


def segments_of(group: Sequence[Piece], caches: Sequence[Any]) -> list[Segment]:
    """The pieces of one pass as segments, in order."""
    segments: list[Segment] = []
    first = 0
    for piece in group:
        rows = piece.end - piece.start
        segments.append(Segment(caches[piece.index], piece.start, first, rows, piece.by_row))
        first += rows
    return segments
