"""How much of what a session has seen still stands; shared by the drafters."""

from __future__ import annotations

from collections.abc import Sequence

_TAIL = 8


def common_length(seen: list[int], tokens: Sequence[int], *, same_object: bool) -> int:
    """How many leading ids of `seen` and `tokens` agree.

    Callers grow one list, so when it is the same object as last time and no shorter, only the last
    few ids are compared; everything else is compared in full, at the speed of list equality.
    """
    count = len(seen)
    if same_object and len(tokens) >= count and seen[-_TAIL:] == list(
        tokens[max(0, count - _TAIL) : count]
    ):
        return count
    count = min(count, len(tokens))
    head = list(tokens[:count])
    if seen[:count] == head:
        return count
    return next(index for index in range(count) if seen[index] != head[index])
