"""Rounds along known answers, and what they would take."""

from __future__ import annotations

import math

import pytest

from anydraft.measure.advise import as_drafted
from anydraft.measure.follow import Counts, Round
from anydraft.measure.rehearsal import Costs, speedup
from anydraft.profile import DraftProfile, Profile, Quiet, TargetProfile, Timing
from anydraft.speed import FREE, Curve, SpeedModel

COSTS = Costs(
    verify=Curve({1: 10.0, 5: 14.0}),
    draft=Curve({2: 3.0, 6: 7.0}),
    by_passes=True,
    overhead=0.0,
    draft_overhead=1.0,
)


def _counts(*rounds: Round) -> Counts:
    counts = Counts()
    for one in rounds:
        counts.add(*one)
    return counts


def _timing(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, 3)


def test_a_round_costs_its_tokens() -> None:
    assert COSTS.of_round(Round(4, 4, 2, passes=6)) == 7.0 + 14.0 + 1.0
    assert COSTS.of_round(Round(4, 0, 0, passes=2)) == 3.0 + 10.0 + 1.0
    assert COSTS.with_free_draft().of_round(Round(4, 0, 0, passes=2)) == 11.0


def test_the_first_round_does_not_count() -> None:
    dear = Round(4, 4, 0, passes=600)
    one = Round(4, 4, 3, passes=6)
    assert speedup([_counts(dear, one, one)], COSTS) == pytest.approx(4 * 10 / 22)
    assert speedup([_counts(dear)], COSTS) == 1.0
    assert speedup([], COSTS) == 1.0


def test_every_kind_has_the_same_weight() -> None:
    first, good, bad = Round(4, 4, 0), Round(4, 4, 3, passes=6), Round(4, 4, 0, passes=6)
    answers = [_counts(first, good), _counts(first, bad), _counts(first, bad)]
    got = speedup(answers, COSTS, ["a", "b", "b"])
    assert got == pytest.approx(math.sqrt(40 / 22 * 10 / 22))
    assert speedup(answers, COSTS) == pytest.approx((40 / 22 * 10 / 22 * 10 / 22) ** (1 / 3))


def test_long_even_answers_are_what_the_speed_model_says() -> None:
    """Where rounds are all alike, both kinds of prediction agree."""
    verify, draft = Curve({1: 10.0, 5: 14.0}), Curve({4: 6.0})
    rounds = [Round(4, 4, k % 5) for k in range(2001)]
    counts = _counts(*rounds[1:])
    model = SpeedModel(acceptance=counts.acceptance, verify=verify, draft=draft, overhead=0.5)
    costs = Costs(verify, draft, by_passes=False, overhead=0.5, draft_overhead=0.5)
    assert speedup([_counts(*rounds)], costs) == pytest.approx(model.speedup(4), rel=1e-2)
    free = costs.with_free_draft()
    assert free.draft is FREE
    assert speedup([_counts(*rounds)], free) == pytest.approx(
        model.with_free_draft().speedup(4), rel=1e-2
    )


def _profile(passes: dict[int, float]) -> Profile:
    return Profile(
        target=TargetProfile(
            facts={}, verify={64: {1: _timing(1.0), 2: _timing(1.5)}}, overhead=_timing(0.1)
        ),
        draft=DraftProfile(
            facts={},
            draft={64: {1: _timing(0.3), 2: _timing(0.5)}},
            passes=passes,
            step={},
            retokenise=0.0,
            read=0.0,
            overhead=_timing(0.2),
        ),
        quiet=Quiet(0.0, 0.0, 0.0),
        memory=0,
        created="",
    )


@pytest.mark.parametrize("passes", [{1: 3.0, 2: 4.0}, {1: 0.0, 2: 0.0}])
def test_costs_go_by_the_passes_of_the_draft_if_it_has_any(passes: dict[int, float]) -> None:
    costs = Costs.of(_profile(passes))
    assert costs.by_passes == any(passes.values())
    assert costs.of_round(Round(2, 1, 0, passes=4)) == pytest.approx(0.5 + 1.5 + 0.2)


def test_advice_reckons_with_what_the_draft_has_read_already() -> None:
    reading, done = Round(2, 2, 0, passes=900), Round(2, 2, 2, passes=3)
    cut = Round(1, 1, 1, passes=1)  # does not count
    counts = _counts(reading, done, cut, done)
    a_model, no_model = (Costs.of(_profile(p)) for p in ({1: 3.0, 2: 4.0}, {1: 0.0, 2: 0.0}))
    assert as_drafted(a_model, 0.5, [counts], 2) == pytest.approx(0.3 / 0.5)
    assert as_drafted(no_model, 0.5, [counts], 2) == 1.0
    assert as_drafted(a_model, 0.5, [Counts()], 2) == 1.0
