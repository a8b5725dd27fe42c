"""How often a draft is right, from answers that the target has already given.

Under `match` the text does not depend on the draft, so one plain answer serves every draft and
every K: the draft is asked as in a real run, and compared with what the answer says next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anydraft.drafter import DraftContext, Drafter, DraftSession
from anydraft.noise import Noise
from anydraft.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what plain decoding said, in target ids.

    Attributes:
        noise: the keyed noise that the answer was drawn with; None if greedy.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    noise: Noise | None = None
    messages: Sequence[dict[str, str]] | None = None


class Round(NamedTuple):
    """One round: candidates asked for, offered and accepted, and passes of the draft model."""

    asked: int
    offered: int
    accepted: int
    passes: int = 0


@dataclass(slots=True)
class Counts:
    """Rounds of one draft, counted by position (index 0: first candidate).

    Attributes:
        reached: rounds in which the candidates before were accepted, and one was asked for.
        accepted: those of them whose candidate was offered and accepted.
        asked, offered: rounds in which so many candidates were asked for, and came back.
        log: the rounds themselves, in order.
    """

    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    log: list[Round] = field(default_factory=list)

    def add(self, asked: int, offered: int, accepted: int, passes: int = 0) -> None:
        """Count one round."""
        self.rounds += 1
        self.log.append(Round(asked, offered, accepted, passes))
        for column in (self.reached, self.accepted, self.asked, self.offered):
            column.extend([0] * (asked - len(column)))
        for k in range(asked):
            self.asked[k] += 1
            self.offered[k] += k < offered
            self.reached[k] += k <= accepted
            self.accepted[k] += k < accepted

    def merge(self, other: Counts) -> None:
        """Add another's rounds."""
        self.rounds += other.rounds
        self.log += other.log
        for name in ("reached", "accepted", "asked", "offered"):
            column, more = getattr(self, name), getattr(other, name)
            column.extend([0] * (len(more) - len(column)))
            for k, count in enumerate(more):
                column[k] += count

    @property
    def acceptance(self) -> list[float]:
        """P(offered and accepted | those before were), as SpeedModel takes it.

        Deep positions are reached seldom: each is mixed with the one before, which counts as two
        rounds.
        """
        found: list[float] = []
        for accepted, reached in zip(self.accepted, self.reached, strict=True):
            weight = 2 if found else 0
            if reached + weight == 0:
                break
            found.append((accepted + weight * (found[-1] if found else 0)) / (reached + weight))
        return found

    @property
    def offers(self) -> list[float]:
        """P(at least k + 1 candidates come back), as SpeedModel's `offered`."""
        return [o / a for o, a in zip(self.offered, self.asked, strict=True) if a]


def follow(
    drafter: Drafter,
    answers: Sequence[Answer],
    num_draft_tokens: int,
    time_is_up: Callable[[], bool] = lambda: False,
) -> list[Counts]:
    """Draft along answers in rounds of K, all of them as one batch; one Counts per answer.

    Args:
        time_is_up: asked after every round; True leaves the rest of the answers out.
    """
    tokens = [list(a.prompt_ids) for a in answers]
    whole = [[*a.prompt_ids, *a.token_ids] for a in answers]
    counts = [Counts() for _ in answers]
    sessions = [
        drafter.new_session(
            DraftContext(
                prompt_ids=list(a.prompt_ids),
                sampling=a.sampling,
                noise=a.noise,
                messages=None if a.messages is None else [dict(m) for m in a.messages],
            )
        )
        for a in answers
    ]
    try:
        # The token after the last candidate must be known too, as in a real run.
        while active := [i for i, t in enumerate(tokens) if len(whole[i]) - len(t) > 1]:
            asked = [min(num_draft_tokens, len(whole[i]) - len(tokens[i]) - 1) for i in active]
            calls = [(sessions[i], tokens[i], k) for i, k in zip(active, asked, strict=True)]
            before = [passes_of(session) for session in sessions]
            for i, k, draft in zip(active, asked, drafter.draft(calls), strict=True):
                ahead = whole[i][len(tokens[i]) :]
                right = _agreeing(draft.token_ids[:k], ahead)
                passes = passes_of(sessions[i]) - before[i]
                counts[i].add(k, len(draft.token_ids[:k]), right, passes)
                tokens[i] += ahead[: right + 1]
            if time_is_up():
                break
    finally:
        for session in sessions:
            session.close()
    return counts


def passes_of(session: DraftSession) -> int:
    """Passes of a draft model so far; 0 where there is no model."""
    return getattr(session, "passes", 0)


def total(counts: Iterable[Counts]) -> Counts:
    """All of them together."""
    result = Counts()
    for one in counts:
        result.merge(one)
    return result


def _agreeing(drafted: Sequence[int], ahead: Sequence[int]) -> int:
    right = 0
    while right < min(len(drafted), len(ahead)) and drafted[right] == ahead[right]:
        right += 1
    return right
