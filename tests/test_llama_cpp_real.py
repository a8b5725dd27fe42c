"""Seed-identity of llama_cpp targets on the real quantised models.

Quantised kernels round differently by the width of a pass, so a token may differ where two are
almost equally good. Each difference is teacher-forced through plain passes (see anydraft.identity):
beyond the stated bound it fails; within it, it is counted and printed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")

from anydraft.backends import load_model
from anydraft.drafters import make_drafter
from anydraft.drafters.lookup import LookupDrafter
from anydraft.engine import Engine
from identity_prompts import PROMPTS
from identity_runs import Identity
from toys import random_drafter

LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "T0.7": {"temperature": 0.7}}
COUNTS = (1, 3, 4, 7)
COPY = "a, b, c, d; one two three four; a, b, c, d; one two"


@pytest.fixture(scope="module")
def models(gemma_path: Path, smollm_path: Path) -> Iterator[dict[str, Any]]:
    opened = {
        "gemma": load_model(gemma_path, runtime="llama_cpp"),
        "smollm": load_model(smollm_path, runtime="llama_cpp"),
    }
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(scope="module")
def checkers(models: Any) -> Iterator[dict[str, Identity]]:
    made = {name: Identity(model) for name, model in models.items()}
    yield made
    for name, checker in made.items():
        sys.stdout.write(f"\n{name}:{checker.summary()}")


def drafters(models: dict[str, Any], target: str, count: int) -> dict[str, Any]:
    other = "smollm" if target == "gemma" else "gemma"
    return {
        "other vendor": make_drafter(models[other], models[target].vocabulary),
        "lookup": LookupDrafter(),
        "random ids": random_drafter(models[target].vocab_size, count),
    }


@pytest.mark.verify
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("target", ["gemma", "smollm"])
def test_identity_slice(target: str, law: str, models: Any, checkers: Any) -> None:
    for at, count in enumerate(COUNTS):
        kind = ("other vendor", "lookup", "random ids", "other vendor")[at]
        prompt = COPY if kind == "lookup" else PROMPTS[(5 * at) % len(PROMPTS)]
        request = {"prompt": prompt, "max_tokens": 32, "seed": at, **LAWS[law]}
        checkers[target].check(drafters(models, target, count)[kind], count, **request)


@pytest.mark.verify
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["other vendor", "lookup", "random ids"])
@pytest.mark.parametrize("target", ["gemma", "smollm"])
def test_identity_matrix(
    target: str, kind: str, count: int, law: str, models: Any, checkers: Any
) -> None:
    drafter = drafters(models, target, count)[kind]
    for seed in (1, 2) if LAWS[law] else (None,):
        for prompt in [COPY, *PROMPTS]:
            request = {"prompt": prompt, "max_tokens": 64, "seed": seed, **LAWS[law]}
            checkers[target].check(drafter, count, **request)


@pytest.mark.verify
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("target", ["gemma", "smollm"])
def test_identity_auto(target: str, law: str, models: Any, checkers: Any) -> None:
    """One engine for all prompts: lengths and sources change as it learns."""
    engine = Engine(models[target], drafters(models, target, 1)["other vendor"])
    drafted = 0
    for seed in (1, 2) if LAWS[law] else (None,):
        for prompt in [COPY, *PROMPTS]:
            request = {"prompt": prompt, "max_tokens": 64, "seed": seed, **LAWS[law]}
            got = engine.generate(**request)
            checkers[target].compare(got, "auto", request)
            drafted += got.stats.draft_n
    assert drafted > 0


@pytest.mark.slow
def test_a_rollback_leaves_no_trace(models: Any) -> None:
    """Bit for bit: what came after the rollback point cannot be seen in what follows."""
    for model in models.values():
        ids = list(range(1000, 1040))
        rows = []
        for wrong in ([], [7, 8, 9]):
            state = model.new_state()
            model.extend([(state, ids[:20], 1)])
            if wrong:
                model.extend([(state, wrong, 1)])
                state.rollback(20)
            rows.append(torch.cat([model.extend([(state, [i], 1)])[0] for i in ids[20:]]))
            state.tokens.clear()  # else its keys would be shared with the second run
            state.close()
        assert torch.equal(rows[0], rows[1])


@pytest.mark.verify
def test_eight_at_once(models: Any, checkers: Any) -> None:
    for target in ("gemma", "smollm"):
        checkers[target].check_batch(None, 0, PROMPTS[:8], max_tokens=24)


@pytest.fixture(scope="module")
def exact(gemma_path: Path, smollm_path: Path) -> Iterator[dict[str, Any]]:
    paths = {"gemma": gemma_path, "smollm": smollm_path}
    opened = {
        name: load_model(path, runtime="llama_cpp", exact=True) for name, path in paths.items()
    }
    yield opened
    for model in opened.values():
        model.close()


@pytest.mark.slow
def test_exact_mode_has_the_same_bits_at_every_width(exact: Any) -> None:
    """Logits, and everything in the cache, across 512 keys, where attention changes otherwise."""
    for model in exact.values():
        ids = model.vocabulary.encode_prompt(" ".join(PROMPTS[:6]) * 8)[:530]
        state = model.new_state()
        model.extend([(state, ids[:505], 0)])
        expected: Any = None
        for width in range(1, 10):
            parts = [ids[at : min(at + width, 530)] for at in range(505, 530, width)]
            rows = torch.cat([model.extend([(state, part, len(part))])[0] for part in parts])
            cache = bytes(model.context_of(state).save())
            expected = expected or (rows, cache)
            assert torch.equal(rows, expected[0]), (model.name, width)
            assert cache == expected[1], (model.name, width)
            state.rollback(505)
        state.close()


@pytest.mark.verify
@pytest.mark.parametrize("law", LAWS)
def test_exact_mode_has_no_near_ties(law: str, exact: Any) -> None:
    for name, model in exact.items():
        checker = Identity(model)
        for at, count in enumerate(COUNTS):
            kind = ("other vendor", "lookup", "random ids", "random ids")[at]
            prompt = COPY if kind == "lookup" else PROMPTS[(5 * at + 1) % len(PROMPTS)]
            request = {"prompt": prompt, "max_tokens": 24, "seed": at, **LAWS[law]}
            checker.check(drafters(exact, name, count)[kind], count, **request)
        checker.check_batch(None, 0, PROMPTS[:3], max_tokens=8, **LAWS[law], seed=1)
        assert checker.near_ties == []


@pytest.mark.slow
def test_gemma_rolls_back_beyond_its_window(exact: Any) -> None:
    """Back by up to 100 tokens on both sides of the window of 512, bit for bit (in exact mode)."""
    model = exact["gemma"]
    source = random.Random(3)
    ids = [source.randrange(300, 200_000) for _ in range(640)]
    plain, drafted = model.new_state(), model.new_state()
    model.extend([(plain, ids[:600], 0)])
    model.extend([(drafted, ids[:480], 0)])
    for length in (500, 520, 560, 600):
        model.extend([(drafted, ids[drafted.length : length], 0)])
        model.extend([(drafted, [source.randrange(300, 200_000) for _ in range(length // 6)], 1)])
        drafted.rollback(length)
    for at in range(600, 640):
        [a, b] = model.extend([(plain, ids[at : at + 1], 1), (drafted, ids[at : at + 1], 1)])
        assert torch.equal(a, b), at
    for state in (plain, drafted):
        state.close()
