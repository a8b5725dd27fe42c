"""How many tokens to draft in the next round, and from which source.

Under `match` no answer can change the text. Under `rejection` and `block` K has to be decided
before anything of the round is drawn: policies know past rounds and the text so far, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anydraft.errors import RequestError

MAX_DRAFT_TOKENS = 64
AUTO = "auto"
OFF = "off"


class Outcome(NamedTuple):
    """What one round did to one sequence.

    Attributes:
        asked, drafted, emitted: tokens of this sequence; all emitted but the last were drafted.
        rows: new tokens in the target's pass, of all sequences.
        prompt: some sequence's prompt was read in this pass too.
        sharers, drafting: sequences in the round, and those of them that asked for a draft.
        longest: most tokens that one of them asked for.
        draft_seconds, target_seconds, overhead_seconds: of the whole round.
        finished: the answer has ended.
    """

    asked: int
    drafted: int
    emitted: int
    rows: int
    prompt: bool
    sharers: int
    drafting: int
    longest: int
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float
    finished: bool


class Policy:
    """Asked once per sequence and round, and told afterwards how it went."""

    def num_draft_tokens(self) -> int:
        """The most target ids to draft; 0 is a round of plain decoding."""
        raise NotImplementedError

    def choose(self, tokens: Sequence[int], room: int, sharers: int) -> int:
        """The same, knowing the text so far.

        Args:
            tokens: prompt and output.
            room: most drafted tokens that could still be used; at least 1.
            sharers: sequences in this round.
        """
        return self.num_draft_tokens()

    def observe(self, outcome: Outcome) -> None:
        """How the round went that `choose` was last asked about."""


@dataclass(frozen=True, slots=True)
class FixedPolicy(Policy):
    """The same number every round.

    Raises:
        RequestError: not a whole number from 0 to MAX_DRAFT_TOKENS.
    """

    count: int

    def __post_init__(self) -> None:
        ok = isinstance(self.count, int) and not isinstance(self.count, bool)
        if not ok or not 0 <= self.count <= MAX_DRAFT_TOKENS:
            raise RequestError(
                f"num_draft_tokens must be {AUTO!r}, {OFF!r} or a whole number from 0 to "
                f"{MAX_DRAFT_TOKENS}, not {self.count!r}"
            )

    def num_draft_tokens(self) -> int:
        return self.count


def check_num_draft_tokens(value: int | str | None) -> None:
    """Raises RequestError unless the value is "auto", "off", None or a number in range."""
    if value is not None and value not in (AUTO, OFF):
        FixedPolicy(value)  # type: ignore[arg-type]  # it refuses strings
