"""Exact enumeration, with fractions, of every verification: the output law is the target's."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydraft.errors import NumericsError
from anydraft.verify import block, match, rejection, residual, settle
from toys import distribution, exact_model

SIZE = 3
ONE = Fraction(1)


def target_law(target: dict[tuple[int, ...], Any], length: int) -> dict[tuple[int, ...], Fraction]:
    """The law of the first `length` ids under the target alone."""
    result = {}
    for ids in itertools.product(range(target[()].size), repeat=length):
        weight = ONE
        for i, token_id in enumerate(ids):
            weight *= target[ids[:i]][token_id]
        if weight:
            result[ids] = weight
    return result


def one_round(verification: Any, target: Any, draft: Any, num_drafted: int, choose: Any) -> Any:
    """Draft, verify, and let the target complete to num_drafted + 1 ids."""
    drafted: list[int] = []
    for _ in range(num_drafted):
        drafted.append(choose(draft[tuple(drafted)]))
    prefixes = [tuple(drafted[:i]) for i in range(num_drafted + 1)]
    plan = verification(drafted, [draft[p] for p in prefixes[:-1]], [target[p] for p in prefixes])
    kept = plan.outcome(lambda _, chance: bool(choose([ONE - chance, chance])))
    output = (*drafted[:kept], choose(plan.laws[kept]))
    while len(output) < num_drafted + 1:
        output = (*output, choose(target[output]))
    return output


@pytest.mark.parametrize("verification", [rejection, block])
@pytest.mark.parametrize("num_drafted", [1, 2, 3])
@pytest.mark.parametrize(("target_zeros", "draft_zeros"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 2)])
def test_output_law_is_the_targets(
    verification: Any, num_drafted: int, target_zeros: int, draft_zeros: int
) -> None:
    target = exact_model(SIZE, num_drafted, seed=num_drafted, zeros=target_zeros)
    draft = exact_model(SIZE, num_drafted, seed=10 + num_drafted, zeros=draft_zeros)
    got = distribution(lambda choose: one_round(verification, target, draft, num_drafted, choose))
    assert got == target_law(target, num_drafted + 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_that_is_the_target_is_always_accepted(seed: int) -> None:
    target = exact_model(SIZE, 2, seed=seed)
    for verification in (rejection, block):
        plan = verification(
            [0, 1], [target[()], target[(0,)]], [target[()], target[(0,)], target[(0, 1)]]
        )
        assert plan.accept == [1, 1]
        assert plan.laws[0] is None


def test_block_never_keeps_fewer_tokens_than_rejection() -> None:
    for seed in range(6):
        target, draft = exact_model(SIZE, 2, seed), exact_model(SIZE, 2, seed + 50)

        def kept(choose: Any, verification: Any, target: Any = target, draft: Any = draft) -> int:
            drafted = [choose(draft[()])]
            drafted.append(choose(draft[tuple(drafted)]))
            rows = [(), (drafted[0],), tuple(drafted)]
            plan = verification(drafted, [draft[r] for r in rows[:-1]], [target[r] for r in rows])
            return plan.outcome(lambda _, chance: bool(choose([ONE - chance, chance])))

        mean = {}
        for verification in (rejection, block):
            law = distribution(lambda choose, v=verification: kept(choose, v))
            mean[verification] = sum(n * p for n, p in law.items())
        assert mean[block] >= mean[rejection]


def test_no_proposal_counts_as_a_rejection() -> None:
    """A draft law may sum to less than 1 and propose nothing the rest of the time."""
    target = exact_model(4, 1, seed=5)
    proposal = np.array([Fraction(1, 5), Fraction(1, 10), Fraction(1, 4), Fraction(1, 20)], object)

    def run(choose: Any) -> Any:
        drawn = choose([*proposal, ONE - proposal.sum()])
        drafted = [None if drawn == 4 else drawn]
        rows = [target[()], target[(drawn if drawn < 4 else 0,)]]
        plan = rejection(drafted, [proposal], rows)
        kept = plan.outcome(lambda _, chance: bool(choose([ONE - chance, chance])))
        output = (*drafted[:kept], choose(plan.laws[kept]))
        return output if len(output) == 2 else (*output, choose(target[output]))

    assert distribution(run) == target_law(target, 2)


@pytest.mark.parametrize("num_drafted", [0, 1, 2, 3])
@pytest.mark.parametrize("drafted", [(0, 0, 0), (2, 1, 0), (1, 1, 2)])
def test_match_says_what_the_target_says(num_drafted: int, drafted: tuple[int, ...]) -> None:
    """Whatever is drafted, the emitted ids have the target's law, each row under its own prefix."""
    target = exact_model(SIZE, num_drafted, seed=3, zeros=1)
    proposal = list(drafted[:num_drafted])

    def run(choose: Any) -> Any:
        output = tuple(match(proposal, lambda row: choose(target[tuple(proposal[:row])])))
        while len(output) < num_drafted + 1:
            output = (*output, choose(target[output]))
        return output

    assert distribution(run) == target_law(target, num_drafted + 1)


def test_match_draws_no_row_beyond_the_first_disagreement() -> None:
    drawn: list[int] = []

    def draw(row: int) -> int:
        drawn.append(row)
        return [7, 8, 9][row]

    assert match([7, 0, 9], draw) == [7, 8]
    assert drawn == [0, 1]


def test_settle_spends_coins_and_pick_apart() -> None:
    """The token after a rejection has randomness of its own, not the coin that rejected."""
    target, draft = np.array([0.2, 0.4, 0.4]), np.array([0.8, 0.1, 0.1])
    counts = np.zeros(3)
    grid = (np.arange(40) + 0.5) / 40
    for token_id, coin, fresh in itertools.product((0, 1, 2), grid, grid):
        plan = rejection([token_id], [draft], [target, target])
        kept, following = settle(
            plan,
            lambda _, chance, coin=coin: coin < chance,
            lambda _, law, fresh=fresh: int(np.searchsorted(law.cumsum(), fresh)),
        )
        counts[token_id if kept else following] += draft[token_id]
    assert counts / counts.sum() == pytest.approx(target, abs=1e-9)


def test_a_draft_outside_its_own_law_is_an_error() -> None:
    law, other = np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.3, 0.5])
    for verification in (rejection, block):
        with pytest.raises(NumericsError, match="no probability"):
            verification([2], [law], [other, other])


def test_a_rejection_that_cannot_be_is_an_error() -> None:
    law = np.array([0.5, 0.5])
    assert residual(law, law) is None
    plan = rejection([0], [law], [law, law])
    with pytest.raises(NumericsError, match="agree"):
        settle(plan, lambda step, chance: False, lambda kept, law: 0)
