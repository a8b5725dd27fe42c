"""What every runtime must do: one suite for LanguageModel and ModelState.

"The same" is within float noise here; where a model promises the same bits (`width_exact`), the
last test holds it to that.
"""

from __future__ import annotations

import random

import pytest
import torch

from anydraft.errors import RollbackError, StateError
from anydraft.model import LanguageModel, ModelState

LONG = 150  # far beyond the windows of the small models, across two blocks of keys


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 96), k=count)


def step_by_step(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    state = model.new_state()
    rows = [model.extend([(state, [token_id], 1)])[0] for token_id in ids]
    state.close()
    return torch.cat(rows)


def same(model: LanguageModel, got: torch.Tensor, expected: torch.Tensor) -> None:
    allowed = getattr(model, "rounding", 2e-4)  # set by the fixture; 0 in exact mode
    torch.testing.assert_close(got, expected, rtol=1e-4 if allowed else 0, atol=allowed)


@pytest.fixture(scope="package")
def plain(model: LanguageModel) -> torch.Tensor:
    """Logits of `random_ids(LONG)`, one token at a time."""
    return step_by_step(model, random_ids(LONG))


def test_logits_depend_on_the_whole_context(model: LanguageModel, plain: torch.Tensor) -> None:
    changed = [random_ids(LONG)[1], *random_ids(LONG)[1:]]
    assert (step_by_step(model, changed[:6]) - plain[:6]).abs().max() > 1e-3
    assert plain.shape == (LONG, model.vocab_size) and plain.dtype == torch.float32


@pytest.mark.parametrize("width", [2, 5, 8, 31, LONG])
def test_any_split_gives_the_same_logits(
    model: LanguageModel, plain: torch.Tensor, width: int
) -> None:
    state, ids = model.new_state(), random_ids(LONG)
    got = []
    for start in range(0, LONG, width):
        part = ids[start : start + width]
        got += model.extend([(state, part, len(part))])
        assert state.length == start + len(part)
    same(model, torch.cat(got), plain)
    state.close()


def test_a_long_prompt_gives_the_same_last_logits(
    model: LanguageModel, plain: torch.Tensor
) -> None:
    state = model.new_state()
    [got] = model.extend([(state, random_ids(LONG), 3)])
    same(model, got, plain[-3:])
    state.close()


def test_no_logits(model: LanguageModel, plain: torch.Tensor) -> None:
    state, ids = model.new_state(), random_ids(LONG)
    [none] = model.extend([(state, ids[:40], 0)])
    assert none.shape == (0, model.vocab_size)
    [got] = model.extend([(state, ids[40:41], 1)])
    same(model, got, plain[40:41])
    state.close()


def test_rollback_at_every_length(model: LanguageModel, plain: torch.Tensor) -> None:
    """Wrong tokens, then back: also far beyond a window, and over a growing buffer."""
    state, ids = model.new_state(), random_ids(LONG)
    for length in [*range(20), 63, 64, 65, 100, LONG - 1]:
        if length > state.length:
            model.extend([(state, ids[state.length : length], 0)])
        model.extend([(state, random_ids(1 + length % 23, seed=99), 1)])
        state.rollback(length)
        assert state.length == length
        [got] = model.extend([(state, ids[length : length + 1], 1)])
        same(model, got, plain[length : length + 1])
    state.close()


def test_rollback_over_many_tokens(model: LanguageModel, plain: torch.Tensor) -> None:
    state, ids = model.new_state(), random_ids(LONG)
    model.extend([(state, random_ids(400, seed=5), 1)])
    state.rollback(0)
    [got] = model.extend([(state, ids, LONG)])
    same(model, got, plain)
    state.rollback(20)
    [got] = model.extend([(state, ids[20:30], 10)])
    same(model, got, plain[20:30])
    state.close()


@pytest.mark.parametrize("wrong", [-1, 6, 1000])
def test_rollback_out_of_reach(model: LanguageModel, wrong: int) -> None:
    state = model.new_state()
    model.extend([(state, random_ids(5), 0)])
    with pytest.raises(RollbackError):
        state.rollback(wrong)
    assert state.length == 5
    state.close()


def test_a_ragged_batch_is_each_state_alone(model: LanguageModel, plain: torch.Tensor) -> None:
    ids = random_ids(LONG)
    lengths, widths = [0, 17, 40, 1, 120], [70, 1, 5, 8, 3]
    states = [model.new_state() for _ in lengths]
    for state, length in zip(states, lengths, strict=True):
        if length:
            model.extend([(state, ids[:length], 0)])
    batch = [
        (state, ids[length : length + width], min(width, 4))
        for state, length, width in zip(states, lengths, widths, strict=True)
    ]
    for got, (state, _, wanted), length, width in zip(
        model.extend(batch), batch, lengths, widths, strict=True
    ):
        assert state.length == length + width
        same(model, got, plain[length + width - wanted : length + width])
    for state in states:
        state.close()


def test_results_are_the_callers(model: LanguageModel, plain: torch.Tensor) -> None:
    state, other = model.new_state(), model.new_state()
    got, _ = model.extend([(state, random_ids(4), 4), (other, random_ids(2), 2)])
    kept = got.clone()
    got.fill_(7.0)
    [later] = model.extend([(other, random_ids(3)[2:], 1)])
    same(model, later, plain[2:3])
    same(model, kept, plain[:4])
    state.close()
    other.close()


def bad_batches(
    model: LanguageModel, state: ModelState
) -> list[list[tuple[ModelState, list[int], int]]]:
    closed = model.new_state()
    closed.close()
    good = model.new_state()
    wrong: list[tuple[ModelState, list[int], int]] = [
        (state, [], 0), (state, [5], 2), (state, [5], -1), (state, [model.vocab_size], 1),
        (state, [-1], 1), (closed, [5], 1),
    ]  # fmt: skip
    batches = [[(good, [4, 5], 1), extension] for extension in wrong]
    batches.append([(state, [5], 1), (good, [5], 1), (state, [6], 1)])
    if model.max_length is not None:
        batches.append([(good, [4], 1), (state, [5] * (model.max_length + 1), 1)])
    return batches


def test_bad_extensions_change_nothing(model: LanguageModel, plain: torch.Tensor) -> None:
    state, ids = model.new_state(), random_ids(LONG)
    model.extend([(state, ids[:10], 0)])
    for batch in bad_batches(model, state):
        with pytest.raises(StateError):
            model.extend(batch)
        assert [s.length for s, _, _ in batch if s is not state and s.length] == []
        assert state.length == 10
    [got] = model.extend([(state, ids[10:12], 2)])
    same(model, got, plain[10:12])
    state.close()


def test_the_context_limit_is_reached_and_not_passed(model: LanguageModel) -> None:
    if model.max_length is None:
        pytest.skip("this model has no limit")
    state = model.new_state()
    [got] = model.extend([(state, random_ids(model.max_length), 1)])
    assert state.length == model.max_length and got.isfinite().all()
    with pytest.raises(StateError):
        model.extend([(state, [5], 1)])
    state.rollback(model.max_length - 1)
    model.extend([(state, [5], 1)])
    state.close()


def test_a_closed_state(model: LanguageModel) -> None:
    state = model.new_state()
    model.extend([(state, [5], 1)])
    state.close()
    state.close()
    with pytest.raises(StateError):
        state.rollback(0)
    with pytest.raises(StateError):
        model.extend([(state, [5], 1)])


def test_rows_have_the_same_bits_at_any_width(model: LanguageModel, plain: torch.Tensor) -> None:
    if not getattr(model, "width_exact", False):
        pytest.skip("this model does not promise the same bits at every width")
    ids = random_ids(LONG)
    for width in range(1, 10):
        state = model.new_state()
        for start in range(0, LONG, width):
            part = ids[start : start + width]
            [got] = model.extend([(state, part, len(part))])
            assert torch.equal(got, plain[start : start + width]), f"width {width} at {start}"
        state.close()
