"""Keyed noise: exact samples, independent where it must be, shared where it should be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anydraft.errors import RequestError
from anydraft.noise import HEAD_NATS, Noise, advance, draw, token_keys
from anydraft.sampling import Law
from anydraft.vocabulary import Vocabulary
from toys import TARGET

KEYS = np.arange(1, 2001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def g_statistic(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """G and its degrees of freedom; cells with an expectation below 5 are merged."""
    big = expected >= 5
    counts = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    keep = expected > 0
    counts, expected = counts[keep], expected[keep]
    nonzero = counts > 0
    g = 2 * (counts[nonzero] * np.log(counts[nonzero] / expected[nonzero])).sum()
    return float(g), len(counts) - 1


def far_out(g: float, df: int, sigmas: float = 5.0) -> bool:
    """Wilson-Hilferty: whether chi-square(df) exceeds `sigmas` standard deviations."""
    return ((g / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df)) > sigmas


def test_draws_follow_the_law() -> None:
    source = np.random.default_rng(0)
    scores = (source.standard_normal(60) * 2).astype(np.float32)
    scores -= scores.max()
    law = Law(None, scores)
    probs = law.probs(60).numpy()
    n = 40_000
    for varied in ("seed", "position"):
        counts = np.zeros(60)
        fixed = Noise(7, 0, [1, 2])
        for i in range(n):
            noise = Noise(i, 0, [1, 2]) if varied == "seed" else fixed
            counts[draw(law, noise, 3 if varied == "seed" else i, KEYS[:60])] += 1
        g, df = g_statistic(counts, probs * n)
        assert not far_out(g, df), (varied, g, df)


def test_the_tail_beyond_the_head_is_drawn_exactly() -> None:
    """Most of the mass lies in many ids that share one Gumbel."""
    size = 400_000
    scores = np.full(size, -HEAD_NATS - 0.1, dtype=np.float32)
    scores[0] = 0.0
    scores[size // 2 :] -= 1.0
    keys = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    law = Law(None, scores)
    probs = law.probs(size).numpy()
    groups = np.zeros(3)
    n = 900
    for i in range(n):
        token = draw(law, Noise(i, 0, []), 0, keys)
        groups[0 if token == 0 else 1 if token < size // 2 else 2] += 1
    halves = [probs[0], probs[1 : size // 2].sum(), probs[size // 2 :].sum()]
    g, df = g_statistic(groups, np.array(halves) * n)
    assert min(groups) > 50
    assert not far_out(g, df), (groups, halves)


def test_noise_depends_on_everything_it_is_keyed_by_and_on_nothing_else() -> None:
    base = Noise(1, 0, [1, 2]).uniform(5, KEYS)
    assert np.array_equal(base, Noise(1, 0, [1, 2]).uniform(5, KEYS))
    others = [
        Noise(2, 0, [1, 2]).uniform(5, KEYS),
        Noise(1, 1, [1, 2]).uniform(5, KEYS),
        Noise(1, 0, [1, 3]).uniform(5, KEYS),
        Noise(1, 0, [2, 1]).uniform(5, KEYS),
        Noise(1, 0, [1, 2]).uniform(6, KEYS),
        Noise(-1, 0, [1, 2]).uniform(5, KEYS),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.12  # 2,000 numbers: over 5 sigma
    assert base.min() > 0
    assert base.max() < 1
    assert abs(base.mean() - 0.5) < 0.04


def test_positions_count_bytes_and_never_repeat() -> None:
    assert advance(3, b"abc") == 6
    assert advance(3, None) == 4
    assert advance(3, b"") == 4


def test_equal_bytes_share_keys_across_vocabularies_but_not_within_one() -> None:
    keys = token_keys(TARGET)
    assert len(set(keys.tolist())) == TARGET.size
    other = Vocabulary.from_tokens([None, b"abc", b"zz", b"a"], eos_ids=[0])
    other_keys = token_keys(other)
    assert other_keys[1] == keys[5]
    assert other_keys[3] == keys[TARGET.ids_by_bytes[b"a"]]
    assert other_keys[0] == keys[11]  # both end their text
    assert other_keys[2] not in keys


def test_a_seed_that_is_no_integer_is_refused() -> None:
    for seed in (1.5, "1", True):
        with pytest.raises(RequestError, match="seed"):
            Noise(seed, 0, [])  # type: ignore[arg-type]


def test_draw_needs_noise_unless_one_hot() -> None:
    one_hot = Law(np.array([4]), np.zeros(1, np.float32))
    assert draw(one_hot, None, 0, KEYS) == 4
    with pytest.raises(ValueError, match="one-hot"):
        draw(Law(None, np.zeros(3, np.float32)), None, 0, KEYS)
