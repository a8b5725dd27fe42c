"""The laboratory's statistics, against tables and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anydraft.measure.gtest import (
    MIN_EXPECTED,
    chi_squared_tail,
    detectable_variation,
    g_test,
    holm,
    merge_cells,
    pool,
    power,
)


def kolmogorov_smirnov(p_values: list[float]) -> float:
    """P-value of the hypothesis that these are uniform (Kolmogorov's series, Stephens' factor)."""
    n = len(p_values)
    ordered = np.sort(p_values)
    above = (np.arange(1, n + 1) / n - ordered).max()
    below = (ordered - np.arange(n) / n).max()
    t = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * max(above, below)
    series = sum((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * series))


@pytest.mark.parametrize(
    ("df", "x", "tail"),  # from the tables
    [(1, 3.841, 0.05), (4, 9.488, 0.05), (10, 23.209, 0.01), (100, 124.342, 0.05), (0, 3.0, 1.0)],
)
def test_chi_squared_tail(df: int, x: float, tail: float) -> None:
    assert chi_squared_tail(x, df) == pytest.approx(tail, rel=2e-3)


def test_g_by_hand() -> None:
    test = g_test([60, 40], [0.5, 0.5])
    raw = 2 * (60 * math.log(1.2) + 40 * math.log(0.8))
    assert test.df == 1 and test.draws == 100
    assert test.g == pytest.approx(raw / (1 + 3 / 600))
    assert test.p_value == pytest.approx(0.045, abs=0.002)


def test_the_impossible_is_no_chance() -> None:
    test = g_test([50, 50, 1], [0.5, 0.5, 0.0])
    assert test.impossible == 1 and test.p_value == 0.0
    assert g_test([7], [1.0]).p_value == 1.0
    assert pool([test, g_test([5, 5], [0.5, 0.5])]).p_value == 0.0


def test_p_values_are_uniform_under_the_law() -> None:
    """The approximation itself, at the smallest expected counts that cells are allowed."""
    source = np.random.default_rng(3)
    law = source.dirichlet(np.ones(40))
    cells = merge_cells(law, 300, 10)
    merged = np.bincount(cells, weights=law)
    assert merged.min() * 300 >= MIN_EXPECTED
    p_values = []
    for _ in range(1000):
        counts = np.bincount(cells[source.choice(40, 300, p=law)], minlength=len(merged))
        p_values.append(g_test(counts, merged).p_value)
    assert kolmogorov_smirnov(p_values) > 0.01
    assert 0.03 < np.mean(np.array(p_values) < 0.05) < 0.07


def test_power_is_what_simulation_finds() -> None:
    source = np.random.default_rng(4)
    law = np.full(8, 1 / 8)
    n = 2000
    d = detectable_variation(n, 7)
    # The least visible fault of its size: cells move by the same share.
    other = law + 2 * d / 8 * np.tile([1, -1], 4)
    found = [g_test(source.multinomial(n, other), law).p_value < 0.05 for _ in range(800)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.05)
    assert power(7, 4 * n * d * d, 0.05) == pytest.approx(0.8, abs=1e-6)
    # 30 cells and 2,000 draws see 0.055; 1,500 cells and 100,000 draws see 0.02.
    assert detectable_variation(2000, 30) == pytest.approx(0.055, abs=0.005)
    assert detectable_variation(100_000, 1500) == pytest.approx(0.018, abs=0.002)
    assert detectable_variation(0, 5) == detectable_variation(5, 0) == 1.0


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_cells() -> None:
    law = np.array([0.5, 0.2, 0.1, 0.1, 0.06, 0.03, 0.01, 0.0])
    cells = merge_cells(law, 1000, 100)
    assert cells.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # the impossible id alone
    assert merge_cells(law, 100, 100).tolist() == [0, 1, 2, 3, 4, 4, 4, 5]
    few = merge_cells(law, 10_000, 4)
    assert few.tolist() == [0, 1, 1, 2, 2, 2, 2, 3]
    # Groups stay apart as long as each expects enough.
    apart = merge_cells(law, 1000, 2, [0, 0, 0, 0, 1, 1, 1, 1])
    assert apart[4] == apart[5] == apart[6] != apart[3]
    together = merge_cells(law, 20, 2, [0, 0, 0, 0, 1, 1, 1, 1])
    assert together[6] == together[3]
    assert merge_cells(np.array([1.0]), 10, 5).tolist() == [0]
