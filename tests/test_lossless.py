"""Seed-identity on toy models: any drafter, any K, any sampling parameter, the same tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from anydraft.drafters.lookup import LookupDrafter
from anydraft.engine import Engine, GenerationRequest
from anydraft.identity import compare_with_plain
from toys import TARGET, ScriptedDrafter, oracle_drafter, random_drafter, toy_target


def _no_doubles(ids: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(0, torch.tensor([ids[-1]]), -math.inf)


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cold": {"temperature": 0.7, "top_p": 0.9},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.3, "top_k": 3},
    "repetition and min-p": {"temperature": 1.0, "repetition_penalty": 1.3, "min_p": 0.05},
    "greedy repetition": {"repetition_penalty": 1.5},
    "frequency": {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "bias": {"temperature": 1.0, "logit_bias": {1: 3.0, 2: -math.inf}},
    "bad words": {"temperature": 1.0, "bad_words": ((3,), (1, 2), (0, 6, 7))},
    "min tokens": {"temperature": 1.0, "min_tokens": 12},
    "ignore eos": {"temperature": 1.0, "ignore_eos": True},
    "processor": {"temperature": 1.0, "processors": (_no_doubles,)},
    "stop": {"temperature": 1.0, "stop": ["bca", " a"]},
}


def drafters(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    return {
        "perfect": oracle_drafter(engine, request),
        "wrong every third": oracle_drafter(engine, request, wrong_every=3),
        "random ids": random_drafter(TARGET.size, 3),
        "end tokens only": ScriptedDrafter(lambda tokens, count: [11] * count),
        "lookup": LookupDrafter(),
    }


@pytest.mark.parametrize("name", SAMPLING)
def test_same_seed_same_tokens(name: str) -> None:
    target = toy_target(seed=len(name))
    plain = Engine(target)
    for seed in (1, 2):
        request = {"prompt": [0, 4, 6], "max_tokens": 40, "seed": seed, **SAMPLING[name]}
        expected = plain.generate(**request)
        for kind, drafter in drafters(plain, request).items():
            for count in range(9):
                engine = Engine(target, drafter, count)
                got = engine.generate(**request)
                where = f"{kind}, K = {count}, seed {seed}"
                assert got.token_ids == expected.token_ids, where
                assert got.text == expected.text, where
                assert got.finish_reason == expected.finish_reason, where
                if count == 0:
                    assert got.stats.draft_n == 0
        report = compare_with_plain(plain, expected, GenerationRequest(**request))
        assert report.identical


def test_different_seeds_and_choices_differ() -> None:
    engine = Engine(toy_target())
    request = {"prompt": [0], "max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    answers = engine.generate(**request, seed=1, n=4)
    assert len({tuple(a.token_ids) for a in answers}) == 4
    assert answers[0].token_ids == engine.generate(**request, seed=1).token_ids
    assert answers[0].token_ids != engine.generate(**request, seed=2).token_ids


def test_first_tokens_of_many_seeds_follow_the_law() -> None:
    target = toy_target(seed=4)
    engine = Engine(target, oracle_drafter(Engine(target), {"prompt": [5], "max_tokens": 2}), 2)
    counts = [0.0] * TARGET.size
    n = 2000
    for seed in range(n):
        answer = engine.generate([5], max_tokens=1, temperature=1.0, seed=seed)
        counts[answer.token_ids[0]] += 1
    logits = torch.tensor(target.logits_fn((5,)))
    logits[12] = -math.inf
    expected = torch.softmax(logits.double(), 0) * n
    kept = expected > 0
    chi = float((((torch.tensor(counts) - expected) ** 2)[kept] / expected[kept]).sum())
    assert chi < 40  # 11 degrees of freedom: chance 4e-5


def test_a_wrong_token_is_a_violation_and_a_tie_is_not() -> None:
    target = toy_target(seed=2)
    engine = Engine(target)
    request = GenerationRequest(prompt=[0, 1], max_tokens=12, temperature=1.0, seed=5)
    good = engine.generate(prompt=[0, 1], max_tokens=12, temperature=1.0, seed=5)
    ids = list(good.token_ids)
    ids[3] = (ids[3] + 1) % 10
    from dataclasses import replace

    report = compare_with_plain(engine, replace(good, token_ids=ids), request)
    assert not report.identical
    assert not report.passed
    assert report.violations[0].position == 3
    assert "bug" in report.summary()


class _Wobble:
    """Logits that change in the last bits with the width of the pass, as real kernels do."""

    def __init__(self, target: Any, size: float) -> None:
        self.target, self.size = target, size
        for name in ("vocabulary", "vocab_size", "max_length", "name", "runtime"):
            setattr(self, name, getattr(target, name))

    def new_state(self) -> Any:
        return self.target.new_state()

    def extend(self, batch: Any) -> Any:
        rows = self.target.extend(batch)
        for (_, token_ids, _), block in zip(batch, rows, strict=True):
            if len(token_ids) > 1:
                block[:, 3] += self.size
        return rows

    def close(self) -> None:
        pass


def test_rounding_that_flips_a_tie_is_reported_as_a_near_tie() -> None:
    """Ids 3 and 4 tie exactly on the narrow path; the wide path prefers 3."""

    def row(tokens: tuple[int, ...]) -> list[float]:
        scores = [0.0] * TARGET.size
        scores[2] = scores[3] = 1.0
        return scores

    from anydraft.backends.toy import ToyModel

    target = _Wobble(ToyModel(TARGET, row), 1e-3)
    drafter = ScriptedDrafter(lambda tokens, count: [2] * count)
    engine = Engine(target, drafter, 3)  # type: ignore[arg-type]
    request = GenerationRequest(prompt=[0], max_tokens=6)
    got = engine.generate([0], max_tokens=6)
    report = compare_with_plain(engine, got, request)
    assert not report.identical
    assert report.passed, report
    assert report.bound == pytest.approx(2e-3, rel=1e-3)
    assert all(d.gap <= 1e-3 for d in report.near_ties)
    assert "near-tie" in report.summary()
