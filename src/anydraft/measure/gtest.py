"""The statistics of the laboratory: one-sample G-tests against a known law, and what they can see.

A G-test compares counts with the law that they should follow: G = 2 sum O ln(O / E), which under
that law is chi-squared distributed with (cells - 1) degrees of freedom as long as no expected count
E is small. Sums of independent G's are again chi-squared, so tests at many prefixes pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]

MIN_EXPECTED = 5.0
"""The fewest draws that a cell must expect; below, chi-squared is no good approximation."""


@dataclass(frozen=True, slots=True)
class GTest:
    """One test, or several pooled.

    Attributes:
        draws: how many outcomes were counted.
        g: the statistic, with Williams' correction.
        df: its degrees of freedom; 0 where the law leaves a single cell.
        impossible: outcomes seen that the law gives no probability at all.
    """

    draws: int
    g: float
    df: int
    impossible: int = 0

    @property
    def p_value(self) -> float:
        """The chance of a G at least this large under the law; 0 if the impossible was seen."""
        return 0.0 if self.impossible else chi_squared_tail(self.g, self.df)


def g_test(counts: Sequence[float] | Floats, law: Sequence[float] | Floats) -> GTest:
    """Compare counts with a law over the same cells.

    Args:
        counts: (cells,) how often each cell was seen.
        law: (cells,) probabilities; normalised here. Cells of probability 0 are left out of G, and
            what was seen in them is reported as impossible.
    """
    seen, probs = np.asarray(counts, dtype=np.float64), np.asarray(law, dtype=np.float64)
    possible = probs > 0
    impossible = round(float(seen[~possible].sum()))
    seen, probs = seen[possible], probs[possible] / probs[possible].sum()
    draws = float(seen.sum())
    df = len(seen) - 1
    if df < 1 or draws == 0:
        return GTest(round(draws) + impossible, 0.0, 0, impossible)
    expected = draws * probs
    drawn = seen > 0
    g = 2.0 * float((seen[drawn] * np.log(seen[drawn] / expected[drawn])).sum())
    # Williams 1976: brings the mean of G down to that of chi-squared.
    correction = 1.0 + (float((1.0 / probs).sum()) - 1.0) / (6.0 * draws * df)
    return GTest(round(draws) + impossible, max(0.0, g) / correction, df, impossible)


def pool(tests: Sequence[GTest]) -> GTest:
    """Independent tests as one."""
    return GTest(
        sum(t.draws for t in tests),
        sum(t.g for t in tests),
        sum(t.df for t in tests),
        sum(t.impossible for t in tests),
    )


def chi_squared_tail(x: float, df: float) -> float:
    """P(chi-squared with `df` degrees of freedom >= x); 1 for df = 0."""
    if df <= 0:
        return 1.0
    args = (torch.tensor(df / 2, dtype=torch.float64), torch.tensor(x / 2, dtype=torch.float64))
    return float(torch.special.gammaincc(*args))


def merge_cells(
    law: Floats, draws: int, most_cells: int, strata: Sequence[int] | None = None
) -> npt.NDArray[np.int64]:
    """Put outcomes together until every cell expects enough draws.

    Outcomes are taken from the most to the least probable, stratum by stratum. Likely ones stay
    alone. Impossible ones are a cell of their own, the last.

    Args:
        law: (outcomes,) probabilities.
        draws: how many outcomes will be counted.
        most_cells: fewer cells see smaller faults, more cells see more kinds of faults.
        strata: (outcomes,) group of each: outcomes of different groups are not put together, unless
            a whole group expects too few draws.

    Returns:
        (outcomes,) the cell of each, from 0 without gaps; `law` summed by cell is the cells' law.
    """
    probs = np.asarray(law, dtype=np.float64)
    groups = np.zeros(len(probs), dtype=np.int64) if strata is None else np.asarray(strata)
    least = max(MIN_EXPECTED / max(draws, 1), 1.0 / max(most_cells, 1))
    cells = np.zeros(len(probs), dtype=np.int64)
    order = np.lexsort((np.arange(len(probs)), -probs, groups))
    order = order[probs[order] > 0]
    starts: list[int] = []  # where a cell begins in `order`
    sizes: list[float] = []
    for at, outcome in enumerate(order):
        new_group = at > 0 and groups[outcome] != groups[order[at - 1]]
        if not sizes or (sizes[-1] >= least) or (new_group and sizes[-1] * draws >= MIN_EXPECTED):
            starts.append(at)
            sizes.append(0.0)
        sizes[-1] += float(probs[outcome])
    if len(sizes) > 1 and sizes[-1] * draws < MIN_EXPECTED:  # what is left joins its neighbour
        starts.pop()
    for index, start in enumerate(starts):
        cells[order[start:]] = index
    cells[probs <= 0] = len(starts)
    return cells


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below a keeps all errors together below a."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def power(df: int, noncentrality: float, alpha: float) -> float:
    """The chance that a G-test rejects at level `alpha` when its noncentrality is this."""
    limit = _critical_value(df, alpha)
    mean = noncentrality / 2
    if mean == 0:
        return alpha
    # Noncentral chi-squared is a Poisson mixture of central ones.
    spread = 12 * math.sqrt(mean) + 30
    first, last = max(0, int(mean - spread)), int(mean + spread)
    j = torch.arange(first, last + 1, dtype=torch.float64)
    weights = torch.exp(j * math.log(mean) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(df / 2 + j, torch.full_like(j, limit / 2))
    return float((weights * tails).sum())


def detectable_variation(
    draws: int, df: int, alpha: float = 0.05, wanted_power: float = 0.8
) -> float:
    """The smallest total variation that a test surely has this power against.

    A law at total variation d from the assumed one has a noncentrality of at least 4 n d^2
    (Cauchy and Schwarz: sum (q-p)^2 / p >= (sum |q-p|)^2), so from this distance on the power is at
    least the one asked for, whatever the fault looks like. The distance is that of merged cells.

    Returns:
        At most 1; 1 where nothing can be told (no draws, or a single cell).
    """
    if draws <= 0 or df <= 0:
        return 1.0
    low, high = 0.0, 10.0
    while power(df, high, alpha) < wanted_power:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if power(df, middle, alpha) < wanted_power else (low, middle)
    return min(1.0, math.sqrt(high / (4 * draws)))


def _critical_value(df: int, alpha: float) -> float:
    """Where the tail of chi-squared is `alpha`."""
    low, high = 0.0, df + 10.0
    while chi_squared_tail(high, df) > alpha:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_squared_tail(middle, df) > alpha else (low, middle)
    return high
