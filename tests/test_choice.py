"""What auto chooses, and from what."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from anydraft.backends.toy import ToyModel, random_logits
from anydraft.choice import SKIP, STRIDE, TEXT, _best, _Sums, choose, keyed_agreement
from anydraft.drafter import DraftLaw
from anydraft.drafters import make_drafter
from anydraft.drafters.lookup import LookupDrafter
from anydraft.engine import Engine
from anydraft.methods import MATCH, Method
from anydraft.sampling import SamplingParams
from anydraft.vocabulary import Vocabulary
from toys import exact_law

BYTES = [bytes([i]) for i in range(256)]
TARGET = Vocabulary.from_tokens([*BYTES, b"the", b" is", None], name="target", eos_ids=[258])
DRAFT = Vocabulary.from_tokens([*BYTES, b"mean", None], name="draft", eos_ids=[257])
SAMPLED = SamplingParams(temperature=0.8)


class Clock:
    """Time passes with each pass of a model, and a little with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now

    def model(self, logits_fn: Any, seconds: float, vocabulary: Vocabulary = TARGET) -> ToyModel:
        clock = self

        class Slow(ToyModel):
            def extend(self, batch: Any) -> Any:
                clock.now += seconds
                return super().extend(batch)

        return Slow(vocabulary, logits_fn, name=vocabulary.name)


def near(seed: int, noise: float) -> Any:
    """Scores like random_logits(…, 1) with some noise."""
    base, other = random_logits(TARGET.size, 1), random_logits(TARGET.size, seed)

    def logits(tokens: tuple[int, ...]) -> list[float]:
        return [a + noise * b for a, b in zip(base(tokens), other(tokens), strict=True)]

    return logits


def test_keyed_agreement_is_the_published_sum() -> None:
    source = random.Random(1)
    p = exact_law(6, source, zeros=1)
    q = exact_law(4, source, zeros=1) * exact_law(1, source)[0]
    ids = np.array([0, 2, 3, 5])
    dense = 0 * p
    dense[ids] = q
    expected = 0.0
    for i in range(6):
        if p[i] and dense[i]:
            # What the draft gives to nothing is one more symbol, the target's never.
            rest = (1 - q.sum()) / dense[i]
            expected += 1 / (sum(max(p[j] / p[i], dense[j] / dense[i]) for j in range(6)) + rest)
    law = DraftLaw(ids, q.astype(float))
    assert keyed_agreement(p.astype(float), law) == pytest.approx(float(expected))
    assert keyed_agreement(dense.astype(float), law) == pytest.approx(1)


def test_a_good_draft_goes_by_its_law() -> None:
    clock = Clock()
    target = clock.model(random_logits(TARGET.size, 1), 0.05)
    drafter = make_drafter(clock.model(near(2, 0.3), 0.005), TARGET)
    choice = choose(target, drafter, SAMPLED, 3, clock)
    assert str(choice.method) == "same+block"
    assert {str(c.method) for c in choice.candidates} == {"match", "same+rejection", "same+block"}
    ids = TARGET.encode_prompt(TEXT)
    expected = []
    for n in range(SKIP, len(ids), STRIDE):
        laws = []
        for model in (target.logits_fn, near(2, 0.3)):
            weights = np.exp(np.array(model(tuple(ids[:n]))) / 0.8)
            laws.append(weights / weights.sum())
        expected.append(np.minimum(*laws).sum())
    by_method = {str(c.method): c for c in choice.candidates}
    assert by_method["same+block"].tokens_per_second > by_method["match"].tokens_per_second
    accepted = by_method["same+block"].acceptance
    assert accepted == pytest.approx(np.mean(expected), abs=1e-5)
    assert by_method["match"].acceptance < accepted
    assert by_method["same+block"].tokens_per_round == pytest.approx(
        1 + accepted + accepted**2 + accepted**3
    )
    assert f"same {accepted:.2f}" in choice.reason


def test_arithmetic_is_counted_where_it_happens() -> None:
    """Rows after the first disagreement cost nothing, except under block; a round ends once."""
    sums = _Sums(
        acceptance={"match": [0.5], "same": [0.5]},
        row_seconds={"match": [1.0], "rejection": [1.0], "block": [1.0]},
        round_seconds={"same+rejection": [2.0], "same+block": [0.0]},
        draft_seconds=[1.0],
        target_seconds=[4.0],
    )
    methods = [MATCH, Method("same", "rejection"), Method("same", "block")]
    found = {str(c.method): c for c in _best(sums, methods, 3).candidates}
    tokens = 1 + 0.5 + 0.25 + 0.125
    for name, seconds in (("match", tokens), ("same+rejection", tokens + 2), ("same+block", 4)):
        assert found[name].tokens_per_second == pytest.approx(tokens / (3 + 4 + seconds))


def test_a_useless_draft_stays_with_match() -> None:
    clock = Clock()
    target = clock.model(random_logits(TARGET.size, 1, 8.0), 0.05)
    drafter = make_drafter(clock.model(random_logits(DRAFT.size, 2, 8.0), 0.005, DRAFT), TARGET)
    choice = choose(target, drafter, SAMPLED, 2, clock)
    assert choice.method == MATCH
    assert choice.overlap is not None
    assert 0.9 < choice.overlap <= 1
    assert {str(c.method) for c in choice.candidates} == {
        "match",
        "tli+rejection",
        "tli+block",
        "ttp+rejection",
        "ttp+block",
    }


def test_auto_measures_once_and_only_under_distribution() -> None:
    target = ToyModel(TARGET, random_logits(TARGET.size, 1), name="target")
    drafter = make_drafter(ToyModel(TARGET, near(2, 0.3), name="draft"), TARGET)
    seed = Engine(target, drafter, 3)
    assert seed.method_for(SAMPLED) == MATCH
    assert target.tokens_processed == 0
    free = Engine(target, drafter, 3, guarantee="distribution")
    assert free.method_for(SamplingParams()) == MATCH
    assert target.tokens_processed == 0
    method = free.method_for(SAMPLED)
    read = target.tokens_processed
    assert read > 0
    assert free.method_for(SAMPLED) == method
    assert target.tokens_processed == read
    answer = free.generate("mean is", max_tokens=8, temperature=0.8, seed=1)
    assert answer.stats.draft_n_accepted > 0
    lookup = Engine(target, LookupDrafter(), 3, guarantee="distribution")
    assert lookup.method_for(SAMPLED) == MATCH
    assert "no probabilities" in lookup.choice_for(SAMPLED).reason


def test_what_cannot_be_measured_goes_by_match(caplog: pytest.LogCaptureFixture) -> None:
    target = ToyModel(TARGET, random_logits(TARGET.size, 1), max_length=40, name="target")
    drafter = make_drafter(ToyModel(TARGET, near(2, 0.3), name="draft"), TARGET)
    engine = Engine(target, drafter, 2, guarantee="distribution")
    answer = engine.generate("mean", max_tokens=4, temperature=0.8, seed=1)
    assert len(answer.token_ids) == 4
    assert "could not be measured (StateError" in engine.choice_for(SAMPLED).reason
    assert "could not be compared" in caplog.text
