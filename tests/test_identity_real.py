"""Seed-identity on real weights: the same tokens as plain decoding, for every draft, K and law.

The slices run in `make test`, the whole matrix in `make verify`. A difference is allowed only as a
near-tie (see anydraft.identity), and is printed with its gap.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anydraft
from anydraft.drafters.cross_vocabulary import CrossVocabularyDrafter
from anydraft.drafters.lookup import LookupDrafter
from anydraft.engine import Engine
from anydraft.policy import Policy
from drafting import reader
from identity_prompts import PROMPTS
from identity_runs import Identity
from tokenizers_for_tests import vocabulary
from toys import random_drafter

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T1": {"temperature": 1.0},
    "T1 repetition min-p": {"temperature": 1.0, "repetition_penalty": 1.1, "min_p": 0.05},
}
COUNTS = (1, 2, 4, 8)
MOST_ROWS = 27  # of a batched pass in the matrix


@pytest.fixture(scope="module")
def pair(gemma_path: Path, smollm_path: Path) -> Iterator[tuple[Any, Any]]:
    engine = anydraft.load(gemma_path, draft=smollm_path)
    yield engine.target, engine.drafter
    engine.close()


@pytest.fixture(scope="module")
def identity(pair: tuple[Any, Any]) -> Iterator[Identity]:
    checker = Identity(pair[0])
    yield checker
    sys.stdout.write(checker.summary())


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_other_vendors_draft_slice(law: str, pair: Any, identity: Identity) -> None:
    index = list(LAWS).index(law)
    for at, prompt in enumerate(PROMPTS[index::8]):
        request = {"prompt": prompt, "max_tokens": 32, "seed": at, **LAWS[law]}
        identity.check(pair[1], COUNTS[(index + at) % 4], **request)


@pytest.mark.slow
def test_auto_slice(pair: Any, identity: Identity) -> None:
    """One engine, so that what it learns from one answer decides in the next."""
    engine = Engine(identity.target, pair[1])
    drafted = 0
    for at, prompt in enumerate((PROMPTS[1], PROMPTS[6], "a, b, c, d; one two; a, b, c, d; one")):
        for law in (LAWS["greedy"], LAWS["T1"]):
            request = {"prompt": prompt, "max_tokens": 32, "seed": at, "ignore_eos": True, **law}
            got = engine.generate(**request)
            identity.compare(got, "auto", request)
            drafted += got.stats.draft_n
    assert drafted > 0


@pytest.mark.slow
def test_lookup_and_random_ids_slice(identity: Identity) -> None:
    copy = "a, b, c, d; one two three four; a, b, c, d; one two"
    for prompt in (copy, PROMPTS[6], PROMPTS[21]):
        for law in (LAWS["greedy"], LAWS["T1"]):
            request = {"prompt": prompt, "max_tokens": 32, "seed": 3, **law}
            identity.check(LookupDrafter(), 10, **request)
            identity.check(random_drafter(identity.target.vocab_size, 5), 4, **request)


class Schedule(Policy):
    """K changing from round to round inside one generation."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts, self.round = counts, 0

    def num_draft_tokens(self) -> int:
        self.round += 1
        return self.counts[(self.round - 1) % len(self.counts)]


@pytest.mark.slow
def test_draft_length_changing_inside_one_generation(
    pair: Any, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anydraft.engine as module

    for law in (LAWS["greedy"], LAWS["T1"]):
        request = {"prompt": PROMPTS[0], "max_tokens": 48, "seed": 4, **law}
        identity.check(None, 0, **request)
        with monkeypatch.context() as patch:
            patch.setattr(module, "FixedPolicy", lambda count: Schedule((4, 0, 4)))
            got = identity.check(pair[1], 4, **request)
        assert got.stats.draft_n > 0


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        pytest.param("sentencepiece_bpe", "greedy", marks=pytest.mark.slow),
        pytest.param("unigram_nfkc", "T1", marks=pytest.mark.slow),
        pytest.param("sentencepiece_bpe", "T1", marks=pytest.mark.verify),
        pytest.param("unigram_nfkc", "greedy", marks=pytest.mark.verify),
    ],
)
def test_drafts_whose_tokenizer_rewrites_text(kind: str, law: str, identity: Identity) -> None:
    """A dummy prefix and NFKC must neither change the output nor make every round start over."""
    prompt = "The ﬁrst ½ of the oﬃce … ① reads:  x != y\n" + PROMPTS[0]
    request = {"prompt": prompt, "max_tokens": 64, "seed": 5, "ignore_eos": True, **LAWS[law]}
    answer = identity.plain.generate(**request)
    model = reader(vocabulary(kind), prompt + answer.text)
    drafter = CrossVocabularyDrafter(model, identity.target.vocabulary)
    sessions: list[Any] = []
    make = drafter.new_session
    drafter.new_session = lambda context: sessions.append(make(context)) or sessions[-1]  # type: ignore
    got = identity.check(drafter, 4, **request)
    prompt_cost = len(model.vocabulary.encode(prompt.encode())) + 2
    per_round = (sessions[0].tokens_processed - prompt_cost) / got.stats.rounds
    assert got.stats.draft_n_accepted > 0
    # These small vocabularies spell a target id in several pieces; starting over costs 60 and more.
    assert per_round < 4 * 8, per_round


@pytest.mark.slow
def test_beyond_the_sliding_window(pair: Any, identity: Identity) -> None:
    """700 tokens of context in all, with rollbacks on both sides of Gemma's window of 512."""
    prompt = " ".join(f"{n} times {n} is {n * n}." for n in range(1, 56))
    for drafter, count in ((pair[1], 4), (LookupDrafter(), 12)):
        got = identity.check(drafter, count, prompt=prompt, max_tokens=60, ignore_eos=True)
        assert got.stats.prompt_tokens + 60 > 512
        assert got.stats.draft_n > got.stats.draft_n_accepted > 0


# ---- the whole matrix


@pytest.mark.verify
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("law", LAWS)
def test_matrix_other_vendors_draft(law: str, count: int, pair: Any, identity: Identity) -> None:
    size = MOST_ROWS // (count + 1)
    for seed in (1, 2) if LAWS[law] else (None,):
        for at in range(0, len(PROMPTS), size):
            prompts = PROMPTS[at : at + size]
            identity.check_batch(pair[1], count, prompts, max_tokens=64, seed=seed, **LAWS[law])


@pytest.mark.verify
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", ["lookup", "random ids"])
def test_matrix_lookup_and_random_ids(law: str, kind: str, identity: Identity) -> None:
    for count in (1, 4, 8):
        lookup = kind == "lookup"
        drafter = LookupDrafter() if lookup else random_drafter(identity.target.vocab_size, count)
        for seed in (1, 2) if LAWS[law] else (None,):
            for at in range(count % 3, len(PROMPTS), 9):
                prompts = PROMPTS[at : at + 3]
                request = {"max_tokens": 64, "seed": seed, **LAWS[law]}
                identity.check_batch(drafter, count, prompts, **request)


@pytest.mark.verify
@pytest.mark.parametrize("law", LAWS)
def test_matrix_auto(law: str, pair: Any, identity: Identity) -> None:
    """One engine for all prompts, so that what it learns from one decides in the next."""
    engine = Engine(identity.target, pair[1])
    drafted = 0
    for seed in (1, 2) if LAWS[law] else (None,):
        for prompt in PROMPTS:
            request = {"prompt": prompt, "max_tokens": 64, "seed": seed, **LAWS[law]}
            got = engine.generate(**request)
            identity.compare(got, "auto", request)
            drafted += got.stats.draft_n
    assert drafted > 0


@pytest.mark.verify
def test_twelve_hundred_tokens_wrapped(pair: Any, identity: Identity) -> None:
    """Gemma's window of 512 is passed twice over."""
    for drafter, count in ((pair[1], 3), (LookupDrafter(), 8)):
        for law in (LAWS["greedy"], LAWS["T1"]):
            got = identity.check(
                drafter, count, prompt=PROMPTS[3], max_tokens=1200, seed=6, ignore_eos=True, **law
            )
            assert len(got.token_ids) == 1200
