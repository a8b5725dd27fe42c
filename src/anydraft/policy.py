"""How many tokens to draft in the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anydraft.errors import RequestError

MAX_DRAFT_TOKENS = 64


class Policy(Protocol):
    """Asked once per sequence and round. Under `match` no answer can change the text."""

    def num_draft_tokens(self) -> int:
        """The most target ids to ask the drafter for; 0 is a round of plain decoding."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same number every round.

    Raises:
        RequestError: not a whole number from 0 to MAX_DRAFT_TOKENS.
    """

    count: int

    def __post_init__(self) -> None:
        ok = isinstance(self.count, int) and not isinstance(self.count, bool)
        if not ok or not 0 <= self.count <= MAX_DRAFT_TOKENS:
            raise RequestError(
                f"num_draft_tokens must be a whole number from 0 to {MAX_DRAFT_TOKENS}, "
                f"not {self.count!r}"
            )

    def num_draft_tokens(self) -> int:
        return self.count
