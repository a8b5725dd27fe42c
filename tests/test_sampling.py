"""The law at a position: order, thresholds, ties, masks, prefixes, and failing closed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anydraft.errors import NumericsError, RequestError
from anydraft.sampling import Law, Sampler, SamplingParams
from anydraft.vocabulary import Vocabulary
from toys import TARGET

PLAIN = Vocabulary.from_tokens([bytes([i]) for i in range(97, 107)])


def law(
    logits: Any, tokens: Any = (), prompt: int = 0, vocabulary: Any = None, **params: Any
) -> Law:
    logits = torch.tensor(logits, dtype=torch.float32)
    if vocabulary is None:
        vocabulary = Vocabulary.from_tokens([b"%d" % i for i in range(len(logits))])
    return Sampler(SamplingParams(**params), vocabulary, prompt).law(logits, list(tokens))


def probs(logits: Any, *args: Any, **params: Any) -> list[float]:
    result: list[float] = law(logits, *args, **params).probs(len(logits)).tolist()
    return result


def softmax(logits: Any) -> np.ndarray:
    e = np.exp(np.asarray(logits, dtype=np.float64) - max(logits))
    return e / e.sum()


def test_temperature_zero_is_one_hot_on_the_lowest_id_of_the_maximum() -> None:
    assert probs([1.0, 3.0, 3.0, -1.0]) == [0, 1, 0, 0]
    assert probs([1.0, 3.0, 3.0], top_p=0.1, top_k=3, min_p=0.9) == [0, 1, 0]


def test_temperature_divides_logits() -> None:
    logits = [0.3, -1.2, 2.0, 0.0]
    assert probs(logits, temperature=0.7) == pytest.approx(
        softmax(np.array(logits) / 0.7), abs=1e-6
    )
    tiny = probs([30.0, 29.9999, 1.0], temperature=1e-5)
    assert tiny[0] == pytest.approx(1 / (1 + math.exp(-10)), rel=0.05)  # low bits are not lost


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # ids 2 and 3 tie at the threshold
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.85}, [0, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 1]),  # after top-k, id 0 has 0.65 of what is left
        ({"top_k": 2, "top_p": 0.64}, [0]),
    ],
)
def test_truncations_are_value_thresholds(params: dict[str, Any], kept: list[int]) -> None:
    weights = [0.52, 0.28, 0.08, 0.08, 0.03, 0.01]
    got = probs(np.log(weights).tolist(), temperature=1.0, **params)
    assert [i for i, p in enumerate(got) if p > 0] == kept
    expected = np.where(np.isin(range(6), kept), weights, 0)
    assert got == pytest.approx(expected / expected.sum(), abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 400),
    st.floats(0.1, 3),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.floats(0, 0.5),
)
def test_truncation_equals_a_full_sort(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Against a plain second implementation: sort, cut, renormalise."""
    logits = (np.random.default_rng(seed).standard_normal(size) * 4).astype(np.float32)
    got = np.array(
        probs(logits.tolist(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    )
    weights = softmax(logits.astype(np.float64) / temperature)
    order = np.argsort(-weights)
    keep = np.ones(size, bool)
    if top_k:
        keep[order[top_k:]] = False
    share = np.where(keep, weights, 0)[order].cumsum() / weights[keep].sum()
    count = int(np.searchsorted(share, top_p)) + 1
    edge = bool(np.abs(share - top_p).min() < 1e-5)  # rounding may decide these either way
    keep[order[count:]] = False
    keep &= weights >= min_p * weights.max()
    edge |= bool(np.abs(weights / weights.max() - min_p).min() < 1e-5) and min_p > 0
    if not edge or top_p == 1.0 and min_p == 0:
        assert np.array_equal(got > 0, keep & (got > 0))
        assert got == pytest.approx(np.where(keep, weights, 0) / weights[keep].sum(), abs=1e-5)


def test_repetition_penalty_covers_prompt_and_output_both_signs() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0, temperature=1.0), PLAIN, 1)
    row = torch.zeros(10)
    row[0], row[1], row[2] = 3.0, -3.0, 3.0
    got = sampler.law(row, [0, 1])
    assert got.log_prob(2) - got.log_prob(0) == pytest.approx(1.5)
    assert got.log_prob(3) - got.log_prob(1) == pytest.approx(6.0)


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    params = {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    got = law([0.0] * 10, [4, 4, 4, 5, 5, 6], 3, PLAIN, **params)  # output: 5 5 6
    assert got.log_prob(0) - got.log_prob(5) == pytest.approx(1.25)
    assert got.log_prob(0) - got.log_prob(6) == pytest.approx(0.75)
    assert got.log_prob(0) - got.log_prob(4) == pytest.approx(0.0)


def test_penalties_change_what_is_said() -> None:
    up = law([1.0, 0.9], [0, 0], 0, frequency_penalty=-2.0)
    down = law([1.0, 0.9], [0, 0], 0, frequency_penalty=2.0)
    assert (up.argmax(), down.argmax()) == (0, 1)


def test_bias_masks_and_their_forbids_agree() -> None:
    params = SamplingParams(
        temperature=1.0, logit_bias={0: -math.inf, 1: 5.0}, bad_words=((2,), (3, 4)), min_tokens=2
    )
    sampler = Sampler(params, TARGET, 1)
    row = torch.zeros(TARGET.size)
    for tokens, forbidden in (([9, 3], {0, 2, 4, 11, 12}), ([9, 1, 1], {0, 2, 12})):
        got = sampler.law(row, tokens)
        impossible = {i for i in range(TARGET.size) if got.log_prob(i) == -math.inf}
        assert impossible == forbidden
        assert {i for i in range(TARGET.size) if sampler.forbids(i, tokens)} == forbidden
        assert got.argmax() == 1


def test_padding_ids_are_never_possible_and_logits_stay_as_they_were() -> None:
    row = torch.zeros(TARGET.size)
    row[12] = 50.0
    before = row.clone()
    for params in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.3, "min_tokens": 3}):
        got = Sampler(SamplingParams(**params), TARGET, 0).law(row, [1])
        assert got.log_prob(12) == -math.inf
        assert torch.equal(row, before)


def test_ignore_eos_forbids_every_end() -> None:
    assert law([0.0] * 11 + [9.0, 0.0], [1], 0, TARGET, ignore_eos=True).log_prob(11) == -math.inf


def test_processors_see_the_prefix_and_run_before_temperature() -> None:
    seen = []

    def only_after_b(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        return logits.index_fill(0, torch.tensor([0]), -math.inf) if ids[-1] == 1 else logits

    params = {"temperature": 0.5, "processors": (only_after_b,)}
    assert law([0.0] * 10, [2, 1], 0, PLAIN, **params).log_prob(0) == -math.inf
    assert law([0.0] * 10, [1, 2], 0, PLAIN, **params).log_prob(0) > -3
    assert seen == [[2, 1], [1, 2]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_none_fail_closed(bad: float, temperature: float) -> None:
    with pytest.raises(NumericsError, match="NaN or infinity"):
        law([0.0, bad, 1.0], temperature=temperature)


def test_nothing_left_to_emit_is_an_error() -> None:
    with pytest.raises(NumericsError, match="every id is forbidden"):
        law([0.0, 0.0], logit_bias={0: -math.inf, 1: -math.inf})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"temperature": 1e9},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": math.inf},
        {"min_tokens": -3},
        {"logit_bias": {0: math.inf}},
        {"bad_words": ((),)},
    ],
)
def test_absurd_parameters_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for params in ({"logit_bias": {10: 1.0}}, {"bad_words": ((3, -1),)}):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            Sampler(SamplingParams(**params), PLAIN, 0)
