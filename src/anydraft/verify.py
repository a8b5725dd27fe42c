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

from anydraft.drafter import DraftLaw
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


class Laws(Sequence[Any]):
    """A row of laws, each computed when it is asked for."""

    def __init__(self, count: int, law: Callable[[int], Probs | None]) -> None:
        self._count = count
        self._law = law

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._law(range(self._count)[index])


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verification does with one draft, before any coin is spent.

    Attributes:
        accept: per proposal the probability of its coin.
        laws: laws[n] is the law of the token after exactly n accepted ones; None where n cannot be.
        longest: False: tokens stand up to the first failed coin (rejection). True: up to the last
            successful one (block).
    """

    accept: list[Any]
    laws: Sequence[Probs | None]
    longest: bool = False

    def outcome(self, flip: Callable[[int, Any], bool]) -> int:
        """How many tokens stand.

        Args:
            flip: (index of a proposal, probability) -> whether its coin succeeds; only called
                where the answer matters.
        """
        if self.longest:
            backwards = reversed(list(enumerate(self.accept)))
            return next((i + 1 for i, chance in backwards if flip(i, chance)), 0)
        tries = enumerate(self.accept)
        return next((i for i, chance in tries if not flip(i, chance)), len(self.accept))


def residual(target_probs: Probs, draft_probs: Probs | DraftLaw, joint: Any = 1) -> Probs | None:
    """[joint * target - draft]+ normalised; None if nothing is left, i.e. it cannot be needed."""
    if isinstance(draft_probs, DraftLaw):
        left = draft_probs.excess(target_probs, joint)
    else:
        left = np.maximum(joint * target_probs - draft_probs, 0 * target_probs)
    mass = left.sum()
    if mass == 0:
        return None
    left /= mass
    return left


def rejection(
    draft_ids: Sequence[int | None],
    draft_probs: Sequence[Probs | DraftLaw],
    target_probs: Sequence[Probs],
) -> Plan:
    """Token-level rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

    Args:
        draft_ids: K ids drawn from `draft_probs` in turn. The last may be None: nothing usable
            was drawn; it counts as a rejection, since falling back to the target's law would be
            biased.
        draft_probs: K laws over target ids; each may sum to less than 1, the rest being the
            probability of None.
        target_probs: K + 1 laws; row i follows the first i drafted ids. Rows after a proposal that
            cannot stand are not looked at: the target may have none under such a prefix.
    """
    accept: list[Any] = []
    for i, (token_id, draft) in enumerate(zip(draft_ids, draft_probs, strict=True)):
        target = target_probs[i]
        accept.append(_ratio(token_id, draft, target, 1))
        if accept[-1] == 0:
            break
    num_drafted = len(draft_ids)
    accept += [0] * (num_drafted - len(accept))

    def law(kept: int) -> Probs | None:
        target = target_probs[kept]
        return target if kept == num_drafted else residual(target, draft_probs[kept])

    return Plan(accept, Laws(num_drafted + 1, law))


def _ratio(token_id: int | None, draft: Probs | DraftLaw, target: Probs, joint: Any) -> Any:
    """min(joint * target / draft, 1) at the proposal."""
    if token_id is None:
        return 0
    if draft[token_id] <= 0:
        raise NumericsError(f"drafted id {token_id} has no probability under its own law")
    return min(joint * target[token_id] / draft[token_id], 0 * target[token_id] + 1)


def block(
    draft_ids: Sequence[int | None],
    draft_probs: Sequence[Probs | DraftLaw],
    target_probs: Sequence[Probs],
) -> Plan:
    """Block verification (Sun et al., arXiv 2403.10444, algorithm 2): never fewer tokens on
    average.

    Arguments as for `rejection`. "Nothing drawn" is one more symbol, to which the target gives
    probability 0: it adds nothing to any [target - draft]+.
    """
    num_drafted = len(draft_ids)
    joints: list[Any] = [1]
    accept: list[Any] = []
    for i, token_id in enumerate(draft_ids):
        joints.append(_ratio(token_id, draft_probs[i], target_probs[i], joints[-1]))
        if joints[-1] == 0:
            break
        if i + 1 == num_drafted:
            accept.append(joints[-1])
            break
        mass = _excess_mass(joints[-1], target_probs[i + 1], draft_probs[i + 1])
        whole = mass + 1 - joints[-1]
        accept.append(mass / whole if whole else 1)
    accept += [0] * (num_drafted - len(accept))

    def law(kept: int) -> Probs | None:
        if kept == num_drafted:
            return target_probs[kept]
        return residual(target_probs[kept], draft_probs[kept], joints[kept])

    return Plan(accept, Laws(num_drafted + 1, law), longest=True)


def _excess_mass(joint: Any, target_probs: Probs, draft_probs: Probs | DraftLaw) -> Any:
    """Sum of [joint * target - draft]+. Only ids that the draft could propose are looked at."""
    if not isinstance(draft_probs, DraftLaw):
        return np.maximum(joint * target_probs - draft_probs, 0 * target_probs).sum()
    inside = target_probs[draft_probs.token_ids]
    left = joint * inside - draft_probs.probs
    return joint * max(1 - inside.sum(), 0) + left[left > 0].sum()


def settle(
    plan: Plan, flip: Callable[[int, Any], bool], pick: Callable[[int, Probs], int]
) -> tuple[int, int]:
    """Spend the coins of a plan.

    Args:
        flip: (index of a proposal, probability) -> whether its coin succeeds, independent of
            everything drawn before.
        pick: (number of tokens that stand, law) -> an id drawn from it, with randomness of its own.

    Returns:
        (number of drafted tokens that stand, the id that follows them).

    Raises:
        NumericsError: the outcome has probability zero; the laws given are not the ones drawn from.
    """
    num_accepted = plan.outcome(flip)
    law = plan.laws[num_accepted]
    if law is None:
        raise NumericsError(
            f"position {num_accepted} was rejected although target and draft agree on it; "
            "the draft's probabilities are not those that it was drawn from"
        )
    return num_accepted, pick(num_accepted, law)


VERIFICATIONS: dict[str, Callable[..., Plan]] = {"rejection": rejection, "block": block}
