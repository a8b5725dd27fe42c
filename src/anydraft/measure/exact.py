"""The target's exact law at a prefix, worked out from its logits independently of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from anydraft.measure.gtest import Floats, GTest, g_test, merge_cells
from anydraft.measure.replay import Replay

END = -1
"""Stands for "nothing follows" where the first token ends the answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How draws are made.

    Attributes:
        count: number of draft tokens.
        pair: whether the first two tokens are compared, or only the first one.
    """

    name: str
    temperature: float
    top_k: int
    count: int
    pair: bool


ONE = Setting("K = 1, T=1, top-k 8", 1.0, 8, 1, pair=True)
TWO = Setting("K = 2, T=1, top-k 8", 1.0, 8, 2, pair=True)
OPEN = Setting("K = 1, T=1, no truncation", 1.0, 0, 1, pair=False)


def exact_law(
    row: torch.Tensor, temperature: float, top_k: int, forbidden: Sequence[int]
) -> Floats:
    """Softmax of (logits / temperature) over the k best ids and ties, in float64.

    Args:
        row: (vocab,) logits.
        forbidden: ids that the target never emits (padding).
    """
    logits = row.detach().double().cpu().numpy().copy()
    logits[list(forbidden)] = -np.inf
    if 0 < top_k < len(logits):
        logits[logits < np.sort(logits)[-top_k]] = -np.inf
    weights = np.exp((logits - logits.max()) / temperature)
    law: Floats = weights / weights.sum()
    return law


@dataclass(slots=True)
class Cells:
    """Outcomes of one kind, merged for counting.

    Attributes:
        law: (cells,) probabilities; the last cell is what cannot happen.
        cell_of: outcome -> cell; an outcome that is not in it cannot happen.
        sample: per cell its likeliest outcome, for messages.
    """

    law: Floats
    cell_of: dict[tuple[int, ...], int]
    sample: list[tuple[int, ...]]

    def count(self, outcomes: dict[tuple[int, ...], int]) -> Floats:
        """(cells,) how many of these outcomes fell into each."""
        counts = np.zeros(len(self.law))
        for outcome, times in outcomes.items():
            counts[self.cell_of.get(outcome, len(self.law) - 1)] += times
        return counts

    def test(self, outcomes: dict[tuple[int, ...], int]) -> GTest:
        """The G-test of these outcomes."""
        return g_test(self.count(outcomes), self.law)


def make_cells(
    outcomes: Sequence[tuple[int, ...]],
    probs: Floats,
    draws: int,
    most_cells: int,
    strata: Sequence[int] | None = None,
) -> Cells:
    """Merge possible outcomes (all with probs > 0) for a number of draws."""
    merged = merge_cells(probs, draws, most_cells, strata)
    size = int(merged.max()) + 1
    law = np.append(np.bincount(merged, weights=probs, minlength=size), 0.0)
    best = [-1.0] * size
    sample: list[tuple[int, ...]] = [()] * (size + 1)
    for outcome, cell, p in zip(outcomes, merged.tolist(), probs.tolist(), strict=True):
        if p > best[cell]:
            best[cell], sample[cell] = p, outcome
    return Cells(law, dict(zip(outcomes, merged.tolist(), strict=True)), sample)


@dataclass(slots=True)
class PrefixLaw:
    """Exact laws of what follows one prefix under one setting.

    Attributes:
        first: (vocab,) law of the first token.
        pairs: (first, second) -> probability, with END as the second where the first ends it;
            empty if the setting does not ask for pairs.
        second: first token -> (vocab,) law of the second.
    """

    first: Floats
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    second: dict[int, Floats] = field(default_factory=dict)


def prefix_law(
    target: Replay, prefix: Sequence[int], setting: Setting, forbidden: Sequence[int]
) -> PrefixLaw:
    """Work the laws out; every row comes from the target itself."""

    def law(row: torch.Tensor) -> Floats:
        return exact_law(row, setting.temperature, setting.top_k, forbidden)

    first = law(target.rows([prefix])[0])
    found = PrefixLaw(first)
    if not setting.pair:
        return found
    ends = target.vocabulary.eos_ids
    firsts = [int(i) for i in np.flatnonzero(first)]
    going_on = [i for i in firsts if i not in ends]
    rows = target.rows([[*prefix, i] for i in going_on]) if going_on else []
    for token_id, row in zip(going_on, rows, strict=True):
        second = found.second[token_id] = law(row)
        for other in np.flatnonzero(second):
            found.pairs[token_id, int(other)] = float(first[token_id] * second[other])
    for token_id in set(firsts) - set(going_on):
        found.pairs[token_id, END] = float(first[token_id])
    return found
