"""The laboratory's books and histories: silent on sound states, loud on broken ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from anydraft.backends.toy import ToyModel, ToyState
from anydraft.engine import Engine
from anydraft.measure.ledger import Ledger, WaywardDrafter
from anydraft.measure.replay import Replay
from anydraft.measure.states import TAIL, check_states
from toys import TARGET, toy_target

TEXTS = [[i * 7 % 10 for i in range(n)] for n in (2, 30, TAIL + 25)]


def test_sound_states_have_no_fault() -> None:
    report = check_states(toy_target(), TEXTS)
    assert report.faults == () and report.worst == report.bound == 0.0
    assert report.histories == 3 and report.rollbacks > 20 and report.rows > 40
    assert report.longest == TAIL + 25


class _Sloppy(ToyState):
    """Keeps a token too many, and hides it."""

    hidden = 0

    @property
    def length(self) -> int:
        return len(self.tokens) - self.hidden

    def rollback(self, length: int) -> None:
        if length < self.length:
            self.hidden += 1
        super().rollback(min(length + self.hidden, len(self.tokens)))


class _Stuck(ToyState):
    """A window that has wrapped: going back does nothing."""

    def rollback(self, length: int) -> None:
        pass


class _Swapped(ToyState):
    """The right length, but the last token is the rejected one."""

    def rollback(self, length: int) -> None:
        last = self.tokens[-1]
        super().rollback(length)
        if self.tokens:
            self.tokens[-1] = last


@pytest.mark.parametrize("kind", [_Sloppy, _Stuck, _Swapped])
def test_broken_states_are_found(kind: Any) -> None:
    class Broken(ToyModel):
        def new_state(self) -> Any:
            return kind(self)

    model = Broken(TARGET, toy_target(seed=3).logits_fn)
    report = check_states(model, TEXTS)
    assert report.faults, kind


class _Wobbly(ToyModel):
    """Rounds differently in wider passes; where `drift` is set, after every rollback too."""

    drift = 0.0

    def extend(self, batch: Sequence[Any]) -> list[torch.Tensor]:
        rows = super().extend(batch)
        return [
            row + 1e-4 * min(len(ids), 9) + self.drift
            for row, (_, ids, _) in zip(rows, batch, strict=True)
        ]


def test_rounding_is_no_fault_and_more_than_rounding_is() -> None:
    model = _Wobbly(TARGET, toy_target(seed=4).logits_fn)
    report = check_states(model, TEXTS)
    assert report.faults == () and 0 < report.worst <= report.bound

    class Drifting(ToyState):
        def rollback(self, length: int) -> None:
            super().rollback(length)
            model.drift = 0.01

    class Fresh(_Wobbly):
        def new_state(self) -> Any:
            model.drift = 0.0
            return Drifting(self)

    model = Fresh(TARGET, toy_target(seed=4).logits_fn)
    assert check_states(model, TEXTS).faults


def test_time_limits_the_histories() -> None:
    assert check_states(toy_target(), TEXTS, time_is_up=lambda: True).histories == 1


def run(target: Any, every: int = 3) -> tuple[Ledger, list[int], list[int]]:
    prompt = [0, 4, 6]
    request = {"max_tokens": 30, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    plain = Engine(target).generate(prompt, **request)
    ledger = Ledger(target)
    drafter = WaywardDrafter([*prompt, *plain.token_ids], every)
    got = Engine(ledger, drafter, 6).generate(prompt, **request)
    assert got.token_ids == plain.token_ids
    assert 0 < got.stats.draft_n_accepted < got.stats.draft_n
    return ledger, prompt, got.token_ids


def test_books_of_a_sound_run_balance() -> None:
    ledger, prompt, output = run(toy_target(seed=5))
    assert ledger.audit(prompt, output) == []
    assert len(ledger.passes) > 5
    ledger.start()
    assert ledger.passes == []


def test_books_show_a_wrong_token_and_a_wrong_length() -> None:
    ledger, prompt, output = run(toy_target(seed=5))
    other = [*output]
    other[2] = (other[2] + 1) % 10
    assert "position 5" in ledger.audit(prompt, other)[0]
    state = ledger.new_state()
    ledger.start()
    ledger.extend([(state, [1, 2], 1)])
    state.inner.rollback(1)
    ledger.extend([(state, [3], 1)])
    assert "says it holds 1" in ledger.audit([1, 2, 3], [])[0]


# ---- the model that remembers


def test_replay_is_the_model_and_costs_a_pass_once() -> None:
    real = toy_target(seed=6)
    replay = Replay(real)
    request = {"prompt": [0, 4, 6], "max_tokens": 12, "temperature": 1.0, "seed": 3}
    expected = Engine(real).generate(**request)
    answer = [0, 4, 6, *expected.token_ids]
    for _ in range(2):
        got = Engine(replay, WaywardDrafter(answer), 4).generate(**request)
        assert got.token_ids == expected.token_ids
        computed = replay.rows_computed
    before, served = real.tokens_processed, replay.rows_served
    Engine(replay, WaywardDrafter(answer), 4).generate(**request)
    assert real.tokens_processed == before and replay.rows_computed == computed
    assert replay.rows_served > served
    replay.forget()
    Engine(replay).generate(**request)
    assert real.tokens_processed > before
    replay.close()
    assert real.new_state().length == 0  # the real one stays open


def test_replay_rows_are_those_of_the_model() -> None:
    real = toy_target(seed=7)
    replay = Replay(real)
    prefixes = [[1], [1, 2], [1, 2, 3, 4], [5, 5], [1, 2, 9], [0] * 30, [1, 2, 9, 9, 9]]
    for row, prefix in zip(replay.rows(prefixes), prefixes, strict=True):
        assert row.tolist() == pytest.approx(real.logits_fn(tuple(prefix)), rel=1e-6)
    assert replay.rows_computed < 30  # not the whole of every prefix
    state = replay.new_state()
    [got] = replay.extend([(state, [1, 2], 2)])
    got.fill_(7.0)
    assert replay.rows([[1, 2]])[0].max() != 7.0


def test_replay_starts_over_when_its_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydraft.measure import replay as module

    monkeypatch.setattr(module, "MEMORY", 3 * TARGET.size * 4)
    real = toy_target(seed=8)
    replay = Replay(real)
    for prefix in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1], [1, 2]):
        [row] = replay.rows([prefix])
        assert row.tolist() == pytest.approx(real.logits_fn(tuple(prefix)), rel=1e-6)
    assert replay.rows_computed == 6
