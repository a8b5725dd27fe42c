"""What the laboratory can find wrong, and how it names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anydraft.errors import StateError

IDENTITY = "identity"
FIRST = "law of the first token"
PAIR = "law of the pair"
ROLLBACK = "rollback"
FAILURE = "failure"

KINDS = (ROLLBACK, IDENTITY, FIRST, PAIR, FAILURE)
"""From cause to effect: a fault of a kind may bring faults of the kinds after it along."""

MEANING = {
    ROLLBACK: "the target's state is not what its tokens say: a rollback, or a state left too long "
    "or too short after a round",
    IDENTITY: "a seed-identical mode emits tokens that are not the target's own draws: the "
    "verification, the noise, or a law seen under the wrong prefix",
    FIRST: "a token drawn right after the prompt does not follow the target's law: acceptance, "
    "the residual, or the draft's probabilities",
    PAIR: "first tokens are right, and what follows them is not: the bonus token, later "
    "acceptances, or randomness used twice",
    FAILURE: "something raised an error, so that it could not be tested",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One violation.

    Attributes:
        kind: one of KINDS.
        mode: which way to decode it was seen in, e.g. "tli+rejection"; "" if it does not matter.
        detail: what was seen, in words.
    """

    kind: str
    mode: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}{f' ({self.mode})' if self.mode else ''}: {self.detail}"


def from_error(error: Exception, mode: str, doing: str) -> Fault:
    """An error as a fault: one of a state is a rollback gone wrong."""
    kind = ROLLBACK if isinstance(error, StateError) else FAILURE
    return Fault(kind, mode, f"{type(error).__name__} while {doing}: {error}")


def diagnosis(faults: Sequence[Fault]) -> list[str]:
    """Which kinds of fault it looks like, the most basic first; nothing if there is none."""
    lines = []
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        if not of_kind:
            continue
        modes = sorted({fault.mode for fault in of_kind if fault.mode})
        where = f" in {', '.join(modes)}" if modes else ""
        lines.append(f"{kind}{where}: {MEANING[kind]}. Seen: {of_kind[0].detail}")
    return lines
