"""Verification: which drafted tokens stand. Pure functions; every one keeps the target's law.

`match` is seed-identical: the target draws its own token at every position and a draft stands
while it agrees. `rejection` and `block` are distribution-identical and need the draft's law. They
are stated as a `Plan` (probabilities and laws) and a `settle` that spends the coins, so that
tests can enumerate a
plan with exact fractions: all arithmetic here works on float64 arrays and on object arrays of
Fraction alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from anydraft.errors import NumericsError

Probs: TypeAlias = Any  # one-dimensional array of float64 or of Fraction


def match(draft_ids: Sequence[int], draw: Callable[[int], int]) -> list[int]:
    """The target's own tokens for one round: as many as the draft foresaw, and one more.

    Args:
        draft_ids: proposed ids, possibly none.
        draw: row -> the target's own token after the first `row` drafted ids. Called for rows 0,
            1, ... only while the draft agrees, so row i is drawn under the right prefix.

    Returns:
        Between 1 and len(draft_ids) + 1 ids; all but the last equal the draft.
    """
    emitted: list[int] = []
    for row, proposed in enumerate([*draft_ids, None]):
        emitted.append(draw(row))
        if emitted[-1] != proposed:
            break
    return emitted


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verification does with one draft, before any coin is spent.

    Attributes:
        accept: per drafted token the probability of its coin.
        laws: laws[n] is the law of the token after exactly n accepted ones; None where n cannot be.
        longest: False: tokens stand up to the first failed coin (rejection). True: up to the last
            successful one (block).
    """

    accept: list[Any]
    laws: list[Probs | None]
    longest: bool = False

    def outcome(self, successes: Sequence[bool]) -> int:
        """How many tokens stand, given which coins succeeded."""
        if self.longest:
            return max((i + 1 for i, success in enumerate(successes) if success), default=0)
        return next((i for i, ok in enumerate(successes) if not ok), len(successes))


def residual(target_probs: Probs, draft_probs: Probs) -> Probs | None:
    """[target - draft]+ normalised; None if nothing is left, i.e. a rejection cannot happen."""
    excess = np.maximum(target_probs - draft_probs, 0 * target_probs)
    mass = excess.sum()
    return None if mass == 0 else excess / mass


def rejection(
    draft_ids: Sequence[int | None], draft_probs: Sequence[Probs], target_probs: Sequence[Probs]
) -> Plan:
    """Token-level rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

    Args:
        draft_ids: K ids drawn from `draft_probs` in turn. The last may be None: nothing usable
            was drawn; it counts as a rejection, since falling back to the target's law would be
            biased.
        draft_probs: K laws over target ids; each may sum to less than 1, the rest being the
            probability of None.
        target_probs: K + 1 laws; row i follows the first i drafted ids.
    """
    accept: list[Any] = []
    for token_id, draft, target in zip(draft_ids, draft_probs, target_probs, strict=False):
        if token_id is None:
            accept.append(0 * target.sum())
        elif draft[token_id] <= 0:
            raise NumericsError(f"drafted id {token_id} has no probability under its own law")
        else:
            accept.append(min(target[token_id] / draft[token_id], 0 * target.sum() + 1))
    pairs = zip(target_probs, draft_probs, strict=False)
    return Plan(accept, [*(residual(t, d) for t, d in pairs), target_probs[len(draft_ids)]])


def block(
    draft_ids: Sequence[int], draft_probs: Sequence[Probs], target_probs: Sequence[Probs]
) -> Plan:
    """Block verification (Sun et al., arXiv 2403.10444, algorithm 2): never fewer tokens on
    average.

    Arguments as for `rejection`, without None; each draft law must sum to 1.
    """
    num_drafted = len(draft_ids)
    one = target_probs[0].sum() * 0 + 1
    joint = one
    accept: list[Any] = []
    laws: list[Probs | None] = [residual(target_probs[0], draft_probs[0])] if num_drafted else []
    for i, token_id in enumerate(draft_ids):
        if draft_probs[i][token_id] <= 0:
            raise NumericsError(f"drafted id {token_id} has no probability under its own law")
        joint = min(joint * target_probs[i][token_id] / draft_probs[i][token_id], one)
        if i + 1 == num_drafted:
            accept.append(joint)
            break
        excess = np.maximum(joint * target_probs[i + 1] - draft_probs[i + 1], 0 * target_probs[0])
        mass = excess.sum()
        whole = mass + one - joint
        accept.append(mass / whole if whole else one)
        laws.append(excess / mass if mass else None)
    return Plan(accept, [*laws, target_probs[num_drafted]], longest=True)


def settle(plan: Plan, coins: Sequence[float], pick: Callable[[Probs], int]) -> tuple[int, int]:
    """Spend the coins of a plan.

    Args:
        coins: one uniform in [0, 1) per drafted token, independent of everything drawn before.
        pick: law -> an id drawn from it, with randomness of its own.

    Returns:
        (number of drafted tokens that stand, the id that follows them).

    Raises:
        NumericsError: the outcome has probability zero; the laws given are not the ones drawn from.
    """
    coin_pairs = zip(coins, plan.accept, strict=True)
    num_accepted = plan.outcome([coin < chance for coin, chance in coin_pairs])
    law = plan.laws[num_accepted]
    if law is None:
        raise NumericsError(
            f"position {num_accepted} was rejected although target and draft agree on it; "
            "the draft's probabilities are not those that it was drawn from"
        )
    return num_accepted, pick(law)
