"""Near-ties between tokens so unlikely that they are drawn together, by a sum over their ids."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anydraft.noise import HEAD_NATS, Noise, draw, gap_among_rest
from anydraft.sampling import Law

BOUND = 0.05
SIZE = 20_000
SOURCE = np.random.default_rng(0)
KEYS = SOURCE.integers(0, 1 << 63, SIZE, dtype=np.uint64)
# Two likely ids; all others lie below what is drawn one by one.
ROW = np.concatenate(([0.0, -1.0], SOURCE.random(SIZE - 2) - HEAD_NATS - 2)).astype(np.float32)


def drawn(row: np.ndarray, noise: Noise) -> int:
    return draw(Law(None, (row - row.max()).astype(np.float32)), noise, 0, KEYS)


@pytest.fixture(scope="module")
def unlikely() -> list[tuple[Noise, int]]:
    """Noise under which the row gives an unlikely id, and that id."""
    found = [(noise := Noise(seed, 0, [1]), drawn(ROW, noise)) for seed in range(400)]
    return [(noise, own) for noise, own in found if own > 1]


def test_rounding_shifts_the_sum_a_little(unlikely: list[tuple[Noise, int]]) -> None:
    near = 0
    for noise, own in unlikely:
        assert gap_among_rest(Law(None, ROW), noise, 0, KEYS, own) == 0.0
        emitted = drawn(ROW + BOUND * SOURCE.uniform(-1, 1, SIZE), noise)
        if emitted > 1 and emitted != own:
            near += 1
            assert gap_among_rest(Law(None, ROW), noise, 0, KEYS, emitted) <= BOUND
            far = 2 + (own + SIZE // 2) % (SIZE - 2)
            assert gap_among_rest(Law(None, ROW), noise, 0, KEYS, far) > BOUND
    assert near >= 3


@pytest.mark.parametrize("away", [-300, -1, 1, 300])
def test_a_move_by_the_gap_reaches_the_id(away: int, unlikely: list[tuple[Noise, int]]) -> None:
    for noise, own in unlikely:
        wanted = own + away
        if not 2 <= wanted < SIZE:
            continue
        size = gap_among_rest(Law(None, ROW), noise, 0, KEYS, wanted)
        sides = np.where(np.arange(SIZE) < max(own, wanted), -1.0, 1.0)
        if away < 0:
            sides = np.where(np.arange(SIZE) <= wanted, 1.0, -1.0)
        sides[:2] = 0.0
        # Single precision cannot hit one id in so many: it comes as close as a few.
        assert abs(drawn(ROW + size * sides, noise) - wanted) <= 3


def test_an_id_may_cross_to_the_unlikely_ones(unlikely: list[tuple[Noise, int]]) -> None:
    for noise, own in unlikely:
        row = ROW.copy()
        row[own] = -HEAD_NATS + 0.01
        if drawn(row, noise) != own:
            assert 0.01 <= gap_among_rest(Law(None, row), noise, 0, KEYS, own) < BOUND


def test_impossible_ids_stay_impossible(unlikely: list[tuple[Noise, int]]) -> None:
    noise, _ = unlikely[0]
    law = Law(np.array([3, 5, 9]), np.array([0.0, -14.0, -15.0], dtype=np.float32))
    assert math.isinf(gap_among_rest(law, noise, 0, KEYS, 4))
    assert gap_among_rest(law, noise, 0, KEYS, 5) > 1  # the likely one won by far
