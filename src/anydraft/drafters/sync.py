"""How much of what a session has seen still stands; shared by the drafters."""

from __future__ import annotations

from collections.abc import Sequence

from anydraft.noise import advance

_TAIL = 8


def common_length(seen: list[int], tokens: Sequence[int], *, same_object: bool) -> int:
    """How many leading ids of `seen` and `tokens` agree.

    Callers grow one list, so when it is the same object as last time and no shorter, only the last
    few ids are compared; everything else is compared in full, at the speed of list equality.
    """
    count = len(seen)
    if (
        same_object
        and len(tokens) >= count
        and seen[-_TAIL:] == list(tokens[max(0, count - _TAIL) : count])
    ):
        return count
    count = min(count, len(tokens))
    head = list(tokens[:count])
    if seen[:count] == head:
        return count
    return next(index for index in range(count) if seen[index] != head[index])


class TokenTrack:
    """A session's own copy of the target ids, and the noise's clock at its end.

    Args:
        token_bytes: the target's, by id.
        prompt_length: ids before the output; the clock starts there.
    """

    __slots__ = ("_clock", "_object", "_prompt_length", "_token_bytes", "tokens")

    def __init__(self, token_bytes: Sequence[bytes | None], prompt_length: int) -> None:
        self.tokens: list[int] = []
        self._token_bytes = token_bytes
        self._prompt_length = prompt_length
        self._clock: list[int] = []  # after each output token
        self._object: Sequence[int] | None = None

    def common(self, tokens: Sequence[int]) -> int:
        """How many leading ids of `tokens` are known already; the rest of the copy is forgotten."""
        count = common_length(self.tokens, tokens, same_object=tokens is self._object)
        self._object = tokens
        del self.tokens[count:]
        del self._clock[max(0, count - self._prompt_length) :]
        return count

    def append(self, token_id: int) -> None:
        """Take over one more id."""
        if len(self.tokens) >= self._prompt_length:
            self._clock.append(advance(self.position, self._token_bytes[token_id]))
        self.tokens.append(token_id)

    @property
    def position(self) -> int:
        """Byte position of the next token, as the noise counts."""
        return self._clock[-1] if self._clock else 0
