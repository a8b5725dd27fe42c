"""The loop: exact laws through it, its invariants, and what happens when a draft misbehaves."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from anydraft.backends.toy import ToyModel
from anydraft.decode import DecodeSequence, decode
from anydraft.drafter import DraftContext
from anydraft.errors import NumericsError
from anydraft.policy import FixedPolicy, Policy
from anydraft.sampling import Sampler, SamplingParams
from anydraft.vocabulary import Vocabulary
from toys import ScriptedDrafter, distribution, exact_model, random_drafter

SIZE = 3
VOCABULARY = Vocabulary.from_tokens([b"x", b"yy", None], eos_ids=[2])
PROMPT = 0


class Ticks:
    """A clock without time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def indexed_model(laws: dict[tuple[int, ...], Any]) -> tuple[ToyModel, list[tuple[int, ...]]]:
    """A model whose rows only name their prefix, so that a test sees which row a draw looked at."""
    prefixes = sorted(laws)
    index = {prefix: float(i) for i, prefix in enumerate(prefixes)}
    return ToyModel(VOCABULARY, lambda tokens: [index[tokens[1:]]] * SIZE), prefixes


def sequence(
    model: ToyModel, limit: int, count: int, drafter: Any, **fields: Any
) -> DecodeSequence:
    params = fields.pop("params", SamplingParams())
    made = DecodeSequence(
        tokens=[PROMPT],
        state=model.new_state(),
        sampler=Sampler(params, model.vocabulary, 1),
        keys=np.empty(0, np.uint64),
        limit=limit,
        policy=fields.pop("policy", FixedPolicy(count)),
        stop=fields.pop("stop", lambda token, from_draft, row: "stop" if token == 2 else None),
        **fields,
    )
    if drafter is not None:
        made.session = drafter.new_session(DraftContext([PROMPT], params))
    return made


@pytest.mark.parametrize("num_drafted", [0, 1, 2, 3])
@pytest.mark.parametrize("foresight", ["fixed", "copy"])
def test_the_loop_has_the_targets_law(
    num_drafted: int, foresight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every outcome of every draw is enumerated: prefixes, rows, end tokens, limits, rollback."""
    length = 4
    laws = exact_model(SIZE, length, seed=7, zeros=1)
    model, prefixes = indexed_model(laws)

    def propose(tokens: list[int], count: int) -> list[int]:
        return [1, 0, 2][:count] if foresight == "fixed" else (tokens[1:] * 3)[:count]

    def run(choose: Any) -> tuple[int, ...]:
        def draw(self: Any, logits: torch.Tensor, prefix: list[int], position: int) -> int:
            seen = prefixes[int(logits[0])]
            assert seen == tuple(prefix[1:]), "a row was used for another prefix"
            assert position == sum(len(VOCABULARY.token_bytes[i] or b"-") for i in seen)
            return int(choose(laws[seen]))

        monkeypatch.setattr(DecodeSequence, "draw", draw)
        drafter = ScriptedDrafter(propose)
        made = sequence(model, 1 + length, num_drafted, drafter)
        for _ in decode(model, drafter, [made], Ticks()):
            assert made.state.tokens == made.tokens[:-1]
        assert made.finish_reason == ("stop" if made.tokens[-1] == 2 else "length")
        return tuple(made.tokens[1:])

    expected: dict[tuple[int, ...], Fraction] = {}
    for ids in itertools.product(range(SIZE), repeat=length):
        cut = ids[: ids.index(2) + 1] if 2 in ids else ids
        weight = Fraction(1)
        for i, token_id in enumerate(ids):
            weight *= laws[ids[:i]][token_id]
        if weight:
            expected[cut] = expected.get(cut, Fraction(0)) + weight
    assert distribution(run) == expected


def greedy_model() -> ToyModel:
    def row(tokens: tuple[int, ...]) -> list[float]:
        scores = [0.0] * 12
        scores[(sum(tokens) * 7 + len(tokens) * 3 + len(tokens) // 4) % 11] = 1.0
        return scores

    return ToyModel(Vocabulary.from_tokens([bytes([97 + i]) for i in range(12)]), row)


def run_greedy(count: int, drafter: Any, limit: int = 41, **fields: Any) -> DecodeSequence:
    model = greedy_model()
    made = sequence(
        model, limit, count, drafter, stop=lambda token, from_draft, row: None, **fields
    )
    for _ in decode(model, drafter, [made], Ticks()):
        assert made.state.tokens == made.tokens[:-1]
    return made


PLAIN = run_greedy(0, None).tokens


def oracle(wrong_every: int = 0) -> ScriptedDrafter:
    def propose(tokens: list[int], count: int) -> list[int]:
        ahead = PLAIN[len(tokens) : len(tokens) + count]
        return [
            (i + 1) % 12 if wrong_every and (len(tokens) + n) % wrong_every == 0 else i
            for n, i in enumerate(ahead)
        ]

    return ScriptedDrafter(propose)


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("wrong_every", [0, 2, 3, 5])
def test_any_draft_gives_the_plain_tokens(count: int, wrong_every: int) -> None:
    made = run_greedy(count, oracle(wrong_every))
    assert made.tokens == PLAIN
    stats = made.stats
    assert stats.generated_tokens == 40 == stats.draft_n_accepted + stats.rounds
    assert stats.draft_seconds > 0
    if not wrong_every and count:
        assert stats.draft_n_accepted == stats.draft_n
        assert stats.rounds == -(-40 // (count + 1))
        assert set(stats.acceptance) == {1.0}


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_limits_hold_inside_a_round(limit: int) -> None:
    made = run_greedy(8, oracle(), limit=limit)
    assert made.tokens == PLAIN[:limit]
    assert made.finish_reason == "length"
    assert made.stats.draft_n <= limit - 2  # never drafts what could not be used


def test_draft_length_may_change_between_rounds() -> None:
    class Schedule(Policy):
        def __init__(self) -> None:
            self.counts = itertools.cycle([4, 0, 4, 1])

        def num_draft_tokens(self) -> int:
            return next(self.counts)

    assert run_greedy(0, oracle(3), policy=Schedule()).tokens == PLAIN


def test_random_ids_some_of_them_invalid_change_nothing() -> None:
    for seed in range(20):
        assert run_greedy(6, random_drafter(12, seed)).tokens == PLAIN


def test_a_drafter_that_gives_too_many_ids_is_cut() -> None:
    made = run_greedy(3, ScriptedDrafter(lambda tokens, count: PLAIN[len(tokens) :]))
    assert made.tokens == PLAIN
    assert len(made.stats.drafted_at) == 3


def test_a_drafter_that_fails_half_way_is_dropped_and_said() -> None:
    def fails(tokens: list[int], count: int) -> list[int]:
        if len(tokens) > 15:
            raise RuntimeError("out of ideas")
        return PLAIN[len(tokens) : len(tokens) + count]

    made = run_greedy(4, ScriptedDrafter(fails))
    assert made.tokens == PLAIN
    assert made.stats.draft_error == "RuntimeError: out of ideas"
    assert 0 < made.stats.draft_n < 20


def test_sequences_of_a_batch_do_not_disturb_each_other() -> None:
    model = greedy_model()
    drafter = oracle(3)
    batch = [
        sequence(model, limit, count, drafter, stop=lambda token, from_draft, row: None)
        for limit, count in [(41, 4), (5, 8), (20, 0), (33, 1)]
    ]
    for took_part in decode(model, drafter, batch, Ticks()):
        for made in took_part:
            assert made.state.tokens == made.tokens[:-1]
    assert [made.tokens for made in batch] == [PLAIN[:n] for n in (41, 5, 20, 33)]


def test_nan_logits_stop_the_generation() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"b"])
    model = ToyModel(vocabulary, lambda tokens: [0.0, float("nan")])
    made = sequence(model, 5, 0, None)
    with pytest.raises(NumericsError):
        list(decode(model, None, [made], Ticks()))


def test_acceptance_by_position_is_conditional() -> None:
    made = run_greedy(3, oracle(2))
    stats = made.stats
    assert len(stats.acceptance) == len(stats.survival)
    product = 1.0
    for rate, kept in zip(stats.acceptance, stats.survival, strict=True):
        product *= rate
        assert kept == pytest.approx(product)
    assert stats.drafted_at[1] <= stats.accepted_at[0]
