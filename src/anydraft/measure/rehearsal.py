"""What rounds would take: rounds of a draft along known answers, and the costs of passes.

SpeedModel speaks of answers without an end, and of one rate of acceptance for all. Real answers are
short, near their end drafts are cut, what a draft has read already it need not read again, and a
mean of speed-ups over prompts is not the speed-up of the mean prompt. Here every answer is gone
through round by round at every K.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anydraft.drafter import Drafter
from anydraft.measure.follow import Answer, Counts, Round, follow
from anydraft.profile import Profile
from anydraft.speed import FREE, Curve


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the parts of a round.

    Attributes:
        verify: of a target pass by its new tokens.
        draft: of a draft call: by the draft model's passes in it if `by_passes`, else by K.
        overhead, draft_overhead: of everything else, in plain decoding and with a draft.
    """

    verify: Curve
    draft: Curve
    by_passes: bool
    overhead: float
    draft_overhead: float

    @staticmethod
    def of(profile: Profile, context: int | None = None, *, sampled: bool = False) -> Costs:
        """From a profile with a draft.

        Args:
            context: tokens before the passes.
            sampled: at a temperature above 0.
        """
        assert profile.draft is not None
        model = profile.speed_model((), context=context, sampled=sampled)
        by_k, passes = model.draft.points, profile.draft.passes
        by_passes = {passes[k]: seconds for k, seconds in by_k.items() if passes.get(k)}
        return Costs(
            verify=model.verify,
            draft=Curve(by_passes or by_k),  # type: ignore[arg-type]
            by_passes=bool(by_passes),
            overhead=model.overhead,
            draft_overhead=model.overhead if model.draft_overhead is None else model.draft_overhead,
        )

    def with_free_draft(self) -> Costs:
        """If drafting took no time."""
        return replace(self, draft=FREE)

    def of_draft(self, one: Round) -> float:
        """Seconds of a round's draft call."""
        return self.draft(one.passes if self.by_passes else one.asked)

    def of_round(self, one: Round) -> float:
        """Seconds of a round with a draft."""
        return self.of_draft(one) + self.verify(one.offered + 1) + self.draft_overhead


def rehearse(
    drafter: Drafter,
    answers: Sequence[Answer],
    lengths: Sequence[int],
    say: Callable[[int], None] = lambda length: None,
) -> dict[int, list[Counts]]:
    """Per K the rounds of each answer, counted.

    Args:
        lengths: the K, each at least 1.
        say: told the K that comes next.
    """
    found = {}
    for length in lengths:
        say(length)
        found[length] = follow(drafter, answers, length)
    return found


def speedup(answers: Sequence[Counts], costs: Costs, kinds: Sequence[str] | None = None) -> float:
    """The geometric mean over answers of their speed after the first round, relative to plain.

    The first round reads the prompt and counts as time to the first token. 1.0 without any other.

    Args:
        answers: the rounds of each.
        kinds: of each answer, where every kind is to have the same weight.
    """
    plain = costs.verify(1) + costs.overhead
    logs: dict[str, list[float]] = {}
    for index, answer in enumerate(answers):
        if later := answer.log[1:]:
            tokens = sum(one.accepted + 1 for one in later)
            ratio = tokens * plain / sum(costs.of_round(one) for one in later)
            logs.setdefault(kinds[index] if kinds else "", []).append(math.log(ratio))
    return math.exp(statistics.fmean(map(statistics.fmean, logs.values()))) if logs else 1.0
