"""Piece tables, the coins of a round, names of methods, and who may use them."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from anydraft.backends.toy import ToyModel, random_logits
from anydraft.drafter import Draft, DraftContext, DraftLaw, DraftSettings
from anydraft.drafters import make_drafter
from anydraft.drafters.lookup import LookupDrafter
from anydraft.drafters.proposal_laws import PieceTable
from anydraft.drafters.steps import Chooser
from anydraft.engine import Engine, load
from anydraft.errors import NumericsError, RequestError
from anydraft.methods import MATCH, offered, parse_method
from anydraft.noise import Noise
from anydraft.sampling import Sampler, SamplingParams
from anydraft.verify import block, rejection
from anydraft.vocabulary import Vocabulary
from toys import TARGET, exact_law, toy_target

PIECES = [(0,), (1,), (0, 1), (0, 1, 2), (0, 2), (), (1,), (3, 0)]


def test_a_table_adds_up_what_was_drawn_from() -> None:
    """First pieces by hand; later ones given the ones before and that more follow."""
    probs = np.array([Fraction(n, 36) for n in range(1, 9)], dtype=object)
    table = PieceTable(PIECES)
    assert table.silent.tolist() == [5]
    ids, laws = table.proposals(probs, 3)
    assert ids == (0, 1, 2)
    assert laws[0].token_ids.tolist() == [0, 1, 3]
    assert (laws[0].probs * 36).tolist() == [1 + 3 + 4 + 5, 2 + 7, 8]
    assert laws[1].token_ids.tolist() == [1, 2]
    assert (laws[1].probs * 12).tolist() == [3 + 4, 5]
    assert laws[2].probs.tolist() == [1]
    ids, laws = table.proposals(probs, 5)
    assert ids == ()
    assert len(laws) == 1


def test_floats_and_fractions_give_one_law() -> None:
    exact = exact_law(len(PIECES), random.Random(1), zeros=2)
    table = PieceTable(PIECES)
    for outcome in np.flatnonzero(exact):
        _, laws = table.proposals(exact, outcome)
        ids, rounded = table.proposals(exact.astype(float), outcome)
        assert len(laws) == max(1, len(ids))
        for law, other in zip(laws, rounded, strict=True):
            assert other.probs.dtype == np.float64
            assert other.probs == pytest.approx(law.probs.astype(float), abs=1e-15)


def test_a_law_leaves_the_rest_of_the_target() -> None:
    law = DraftLaw(np.array([1, 3]), np.array([0.5, 0.25]))
    target = np.array([0.1, 0.4, 0.1, 0.4])
    assert law.excess(target) == pytest.approx([0.1, 0.0, 0.1, 0.15])
    assert target.tolist() == [0.1, 0.4, 0.1, 0.4]
    assert [law[i] for i in range(5)] == [0, 0.5, 0, 0.25, 0]


@pytest.mark.parametrize("verification", [rejection, block])
def test_rows_after_an_impossible_proposal_are_not_asked_for(verification: Any) -> None:
    """The target may have no law at all under such a prefix (a grammar, say)."""
    law = DraftLaw(np.array([0, 1]), np.array([0.5, 0.5]))

    class Rows:
        def __getitem__(self, row: int) -> Any:
            assert row < 1
            return np.array([0.0, 0.5, 0.5])

    plan = verification([0, 1], [law, law], Rows())
    assert plan.accept == [0, 0]
    assert plan.laws[0] == pytest.approx([0, 0, 1])


# ---- coins


def test_coins_never_repeat() -> None:
    noise = Noise(5, 0, [1, 2])
    keys = [
        (tag, start, step)
        for tag in ("draft", "accept", "residual", "bonus")
        for start in range(30)
        for step in range(5)
    ]
    coins = [noise.coin(*key) for key in keys]
    assert len(set(coins)) == len(keys)
    assert abs(np.mean(coins) - 0.5) < 0.05
    assert coins == [Noise(5, 0, [1, 2]).coin(*key) for key in keys]
    assert not set(coins) & {Noise(5, 1, [1, 2]).coin(*key) for key in keys}


def test_a_pick_follows_the_law_and_takes_nothing_impossible() -> None:
    probs = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    noise = Noise(1, 0, [])
    counts = np.zeros(6)
    for step in range(4000):
        counts[noise.pick(probs, "draft", 0, step)] += 1
    assert counts / 4000 == pytest.approx(probs, abs=0.03)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]

    class Last(Noise):
        def coin(self, tag: str, start: int, step: int) -> float:
            return 1.0  # what rounding may make of the largest one

    assert Last(1, 0, []).pick(probs, "draft", 0, 0) == 4


def test_a_pick_from_a_large_vocabulary_is_the_inverse_of_its_running_sum() -> None:
    source = np.random.default_rng(1)
    probs = source.random(5000) * (source.random(5000) < 0.3)
    probs[2048:3072] = 0
    probs = (probs / probs.sum()).astype(np.float32)
    noise = Noise(3, 0, [])
    for step in range(300):
        coin = noise.coin("bonus", 7, step)
        sums = probs.cumsum(dtype=np.float64)
        expected = int(np.searchsorted(sums, coin * sums[-1], side="right"))
        assert noise.pick(probs, "bonus", 7, step) == expected


# ---- methods


def test_names_of_methods() -> None:
    assert parse_method("match") == MATCH
    assert MATCH.label == "seed-identical"
    method = parse_method("ttp+block")
    assert (method.law, method.verification, method.label) == (
        "ttp",
        "block",
        "distribution-identical",
    )
    assert str(method) == "ttp+block"
    for name, words in {
        "tli+match": "needs no law",
        "rejection": "needs the law",
        "tli": "no method",
        "slem+block": "no method",
        "": "no method",
    }.items():
        with pytest.raises(RequestError, match=words):
            parse_method(name)


DRAFT = Vocabulary.from_tokens(
    [b"a", b"b", b"c", b"ca", b"bca", b" ", None], name="toy draft", eos_ids=[6]
)


def toy_draft(seed: int = 3) -> ToyModel:
    return ToyModel(DRAFT, random_logits(DRAFT.size, seed, 1.0), name="toy draft")


def test_what_is_offered() -> None:
    target = toy_target()
    across = Engine(target, make_drafter(toy_draft(), TARGET))
    names = [str(m) for m in offered(across.laws)]
    assert names == ["match"] + [
        f"{law}+{v}" for law in ("union", "tli", "ttp", "slrs") for v in ("rejection", "block")
    ]
    alike = Engine(target, make_drafter(toy_target(2), TARGET))
    assert [str(m) for m in offered(alike.laws)] == ["match", "same+rejection", "same+block"]
    assert [str(m) for m in offered(Engine(target, LookupDrafter()).laws)] == ["match"]


def test_refusals_say_why() -> None:
    target = toy_target()
    across, alike = make_drafter(toy_draft(), TARGET), make_drafter(toy_target(2), TARGET)
    large = Vocabulary.from_tokens([bytes([i % 256, i // 256]) for i in range(600)], name="large")
    many = make_drafter(ToyModel(large, random_logits(600, 1), name="large"), TARGET)
    for drafter, method, words in (
        (across, "same+block", "ids mean the same|split text"),
        (alike, "tli+rejection", "use the law 'same'"),
        (LookupDrafter(), "tli+rejection", "goes with 'match'"),
        (None, "tli+rejection", "needs a draft"),
        (many, "slrs+rejection", "360,000 sequences of 2 draft tokens.*'ttp'"),
    ):
        with pytest.raises(RequestError, match=words):
            Engine(target, drafter, method=method)
    with pytest.raises(RequestError, match="distribution-identical"):
        Engine(target, across, method="tli+block", guarantee="seed")
    with pytest.raises(RequestError, match="guarantee must be"):
        load(target, toy_draft(), guarantee="exact")


@pytest.mark.parametrize("method", ["union+rejection", "tli+block", "ttp+rejection", "slrs+block"])
def test_answers_are_drafted_and_end(method: str) -> None:
    target, prompt = toy_target(), [0, 1, 2]
    engine = Engine(target, make_drafter(toy_draft(), TARGET), 3, method=method)
    answers = [
        engine.generate(prompt, max_tokens=30, temperature=0.9, top_p=0.95, seed=s)
        for s in range(6)
    ]
    assert any(a.stats.draft_n_accepted for a in answers)
    assert all(a.stats.draft_error is None for a in answers)
    assert [a.token_ids for a in answers] == [
        engine.generate(prompt, max_tokens=30, temperature=0.9, top_p=0.95, seed=s).token_ids
        for s in range(6)
    ]
    greedy = engine.generate(prompt, max_tokens=30)
    assert greedy.token_ids == engine.plain().generate(prompt, max_tokens=30).token_ids


@pytest.mark.parametrize("law", ["tli", "ttp", "slrs"])
def test_the_drafts_state_holds_what_was_drawn(law: str) -> None:
    target, model = toy_target(), toy_draft()
    drafter: Any = make_drafter(model, TARGET)
    noise = Noise(2, 0, [0])
    context = DraftContext([0], SamplingParams(temperature=1.0), noise, law=law)
    session, tokens = drafter.new_session(context), [0, 1, 2, 4, 5, 0]
    for length in range(1, len(tokens) + 1):
        draft = drafter.draft([(session, tokens[:length], 4)])[0]
        assert len(draft.laws) in (len(draft.token_ids), len(draft.token_ids) + 1)
        state = session._state
        assert state.tokens == session.ids[: state.length]
    assert session.failures == 0, session.failure
    target.close()


def test_a_draft_without_laws_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful:
        name, laws = "forgetful", {"same": ""}

        def new_session(self, context: Any) -> Any:
            return make_drafter(toy_target(2), TARGET).new_session(context)

        def draft(self, batch: Any) -> Any:
            return [Draft([0]) for _ in batch]

    engine = Engine(toy_target(), Forgetful(), 2, method="same+rejection")  # type: ignore[arg-type]
    answer = engine.generate([0], max_tokens=5, temperature=1.0, seed=1)
    assert "needs the laws" in (answer.stats.draft_error or "")


def test_a_law_that_was_not_drawn_from_is_an_error() -> None:
    law = DraftLaw(np.array([1]), np.array([1.0]))
    for verification in (rejection, block):
        with pytest.raises(NumericsError, match="no probability"):
            verification([0], [law], [np.array([0.5, 0.5])] * 2)


# ---- settings of the draft


def test_a_draft_is_unsure_by_its_own_scores() -> None:
    def unsure(scores: list[float], **settings: Any) -> bool:
        chooser = Chooser(toy_draft(), SamplingParams(), 1, None, [6], DraftSettings(**settings))
        return chooser.unsure(torch.tensor(scores))

    scores = [math.log(n) for n in (5, 2, 1, 1, 1, 1)] + [9.0]  # the last id is never drawn
    best = 5 / 11
    entropy = -sum(n / 11 * math.log(n / 11) for n in (5, 2, 1, 1, 1, 1))
    assert not unsure(scores)
    assert not unsure(scores, min_confidence=best - 0.01)
    assert unsure(scores, min_confidence=best + 0.01)
    assert not unsure(scores, max_entropy=entropy + 0.01)
    assert unsure(scores, max_entropy=entropy - 0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.3},
        {"temperature": 0.0},
        {"min_confidence": 0.5},
        {"max_entropy": 1.0, "vocabulary": 4},
        {"vocabulary": "shared"},
    ],
)
@pytest.mark.parametrize("draft", ["across", "alike"])
def test_settings_do_not_change_what_match_says(settings: Any, draft: str) -> None:
    target = toy_target()
    model = toy_draft() if draft == "across" else toy_target(2)
    engine = load(target, model, num_draft_tokens=3, draft_settings=settings)
    default = load(target, model, num_draft_tokens=3)
    drafted = []
    for seed, temperature in enumerate((0.0, 0.9, 0.9, 0.9)):
        request = {"max_tokens": 25, "temperature": temperature, "seed": seed, "ignore_eos": True}
        answers = [e.generate([0, 1, 2], **request) for e in (engine, default, engine.plain())]
        assert len({tuple(a.token_ids) for a in answers}) == 1
        drafted.append([(a.stats.rounds, a.stats.draft_n) for a in answers[:2]])
    if settings != {"vocabulary": "shared"} or draft == "across":
        assert any(mine != others for mine, others in drafted)


def test_settings_out_of_range_are_refused() -> None:
    target = toy_target()
    for settings, words in (
        ({"temperature": -1}, "temperature must be"),
        ({"min_confidence": 2}, "min_confidence must be"),
        ({"vocabulary": "half"}, "'shared' or a number"),
        ({"confidence": 0.5}, "unknown draft setting"),
    ):
        with pytest.raises(RequestError, match=words):
            load(target, toy_draft(), draft_settings=settings)
    with pytest.raises(RequestError, match="lookup drafts have no"):
        load(target, "lookup", draft_settings={"min_confidence": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tli+rejection", "ttp+block", "slrs+rejection"])
def test_answers_of_many_seeds_follow_the_targets_law(method: str) -> None:
    """The same through the engine, with its own noise, floats and sampling parameters."""
    target, prompt, count = toy_target(4), [0, 5], 1000
    engine = Engine(target, make_drafter(toy_draft(), TARGET), 2, method=method)
    request: dict[str, Any] = {"max_tokens": 3, "temperature": 0.9, "top_k": 5}
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(count):
        answer = engine.generate(prompt, seed=seed, **request)
        seen[tuple(answer.token_ids[:2])] += 1
        accepted += answer.stats.draft_n_accepted
    sampler = Sampler(SamplingParams(temperature=0.9, top_k=5), TARGET, len(prompt))

    def law(ids: list[int]) -> Any:
        row = torch.tensor(target.logits_fn((*prompt, *ids)), dtype=torch.float32)
        return sampler.law(row, [*prompt, *ids]).probs(TARGET.size).tolist()

    expected: dict[tuple[int, ...], float] = {}
    for first, p in enumerate(law([])):
        for second, q in enumerate(law([first])) if p and first not in TARGET.eos_ids else ():
            expected[first, second] = count * p * q
        if first in TARGET.eos_ids and p:
            expected[first,] = count * p
    expected = {ids: n for ids, n in expected.items() if n}
    assert set(seen) <= set(expected)
    assert accepted > count / 10
    chi = sum((seen[ids] - n) ** 2 / n for ids, n in expected.items())
    freedom = len(expected) - 1
    assert chi < freedom + 4.5 * math.sqrt(2 * freedom)  # chance about 1e-5
