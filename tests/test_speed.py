"""SpeedModel against a simulation of rounds, the published formula, and its own bounds."""

from __future__ import annotations

import random

import pytest

from anydraft.speed import Curve, SpeedModel

JAGGED = Curve(
    {1: 13.5, 2: 25.0, 3: 38.0, 4: 34.0, 5: 48.0, 8: 63.0, 9: 80.0, 16: 121.0, 17: 140.0}
)


def simulated_speed(model: SpeedModel, count: int, tokens: int, seed: int) -> float:
    """Tokens per second of rounds that are played, coin by coin."""
    coins = random.Random(seed)
    said, seconds = 0, model.startup if count else 0.0
    while said < tokens:
        offered = 0
        threshold = coins.random()
        while offered < count:
            at_least = model.offered[min(offered, len(model.offered) - 1)] if model.offered else 1.0
            if threshold >= at_least:
                break
            offered += 1
        accepted = 0
        while accepted < offered:
            # acceptance counts a candidate that was not offered as a failure
            chance = model.acceptance[min(accepted, len(model.acceptance) - 1)]
            before = model.offered[accepted - 1] if model.offered and accepted else 1.0
            now = model.offered[accepted] if model.offered else 1.0
            if coins.random() >= chance * before / now:
                break
            accepted += 1
        said += accepted + 1
        seconds += model.verify(offered + 1)
        seconds += model.draft(count) if count else 0.0
        seconds += model.overhead
    return said / seconds


@pytest.mark.parametrize("count", [0, 1, 3, 6])
@pytest.mark.parametrize("offered", [(), (0.9, 0.8, 0.8, 0.7, 0.6, 0.5)])
def test_expected_speed_is_that_of_simulated_rounds(count: int, offered: tuple[float, ...]) -> None:
    model = SpeedModel(
        acceptance=[0.7, 0.6, 0.65, 0.5, 0.5, 0.4],
        offered=offered,
        verify=JAGGED,
        draft=Curve({1: 3.0, 8: 20.0}),
        overhead=0.5,
    )
    got = simulated_speed(model, count, tokens=60_000, seed=count)
    assert got == pytest.approx(model.tokens_per_second(count), rel=0.015)


def test_constant_acceptance_and_free_rows_give_the_published_formula() -> None:
    for alpha in (0.3, 0.6, 0.9):
        for cost in (0.05, 0.2):
            model = SpeedModel(
                acceptance=[alpha], verify=Curve({1: 1.0, 17: 1.0}), draft=Curve({0: 0, 1: cost})
            )
            for count in range(9):
                expected = (1 - alpha ** (count + 1)) / ((1 - alpha) * (count * cost + 1))
                assert model.speedup(count) == pytest.approx(expected)


def test_start_up_is_spread_over_the_tokens_that_are_left() -> None:
    model = SpeedModel(
        acceptance=[0.8], verify=Curve({1: 1.0, 9: 1.4}), draft=Curve({0: 0, 1: 0.1}), startup=2.0
    )
    short, long = (
        SpeedModel(
            acceptance=model.acceptance,
            verify=model.verify,
            draft=model.draft,
            startup=2.0,
            expected_tokens=tokens,
        )
        for tokens in (2, 400)
    )
    assert short.best() == 0 and long.best() > 2
    assert long.seconds_per_token(3) == pytest.approx(model.seconds_per_token(3) + 2.0 / 400)
    assert short.tokens_per_second(0) == model.tokens_per_second(0) == 1.0


def test_serial_verification_never_wins_and_break_even_says_so() -> None:
    serial = SpeedModel(acceptance=[1.0], verify=Curve({n: float(n) for n in range(1, 18)}))
    assert serial.best() == 0 or serial.speedup(serial.best()) == pytest.approx(1.0)
    costly = SpeedModel(acceptance=[1.0], verify=serial.verify, draft=Curve({0: 0.0, 1: 0.1}))
    assert costly.best() == 0
    assert costly.break_even() is None
    assert costly.row_cost() == pytest.approx(1.0)


def test_break_even_is_where_the_best_speed_up_is_one() -> None:
    model = SpeedModel(
        acceptance=[0.1], verify=Curve({1: 1.0, 17: 2.3}), draft=Curve({0: 0.0, 1: 0.15})
    )
    needed = model.break_even()
    assert needed is not None
    for acceptance, wins in ((needed - 0.01, False), (needed + 0.01, True)):
        assert (model.with_acceptance(acceptance).best() > 0) == wins
    # Survival never exceeds the first acceptance: no K helps below draft cost + row cost.
    assert needed == pytest.approx(0.15 + model.row_cost(), abs=0.01)


def test_ceilings_bound_what_is_expected() -> None:
    model = SpeedModel(acceptance=[0.6, 0.5], verify=JAGGED, draft=Curve({0: 0.0, 1: 4.0}))
    for row in model.table(8):
        assert row["speedup"] <= row["speedup_free_draft"] + 1e-12
        assert row["speedup"] <= row["speedup_all_accepted"] + 1e-12
    assert model.table(8)[0]["speedup"] == 1.0


def test_the_best_length_takes_the_cheap_width_of_a_jagged_curve() -> None:
    model = SpeedModel(acceptance=[0.85], verify=JAGGED, draft=Curve({0: 0.0, 1: 0.5}))
    assert model.best(4) == 3  # a pass over four rows is cheaper than one over three


def test_curves_run_straight_between_and_beyond_their_points() -> None:
    curve = Curve({1: 10.0, 3: 20.0, 5: 20.0})
    assert [curve(n) for n in (1, 2, 3, 4, 5)] == [10.0, 15.0, 20.0, 20.0, 20.0]
    assert curve(9) == pytest.approx(30.0)
    assert curve(0) == pytest.approx(7.5)
    assert Curve({1: 2.0})(7) == 2.0
    with pytest.raises(ValueError, match="at least one point"):
        Curve({})
