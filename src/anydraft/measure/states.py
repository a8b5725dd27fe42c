"""Is a state, after any history of accepted and rejected drafts, what a fresh pass would be?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from anydraft.model import LanguageModel, ModelState

TAIL = 40
"""Last tokens of a text, which go through rounds; what lies before goes in at once, as a prompt."""
MOST_DRAFTED = 8
MOST_BACK = 16
"""Furthest step back, in tokens; passes stay so narrow that exact kernels owe the same bits."""


@dataclass(frozen=True, slots=True)
class StateReport:
    """What random histories did to a model's states.

    Attributes:
        histories, rollbacks, rows: how many were tried, and how many rows of logits compared.
        longest: tokens in the longest state.
        bound: largest admissible difference of a logit: twice what fresh passes of several widths
            differ among themselves; 0 means that rows must have the same bits.
        worst: largest difference seen after a history.
        faults: in words.
    """

    histories: int
    rollbacks: int
    rows: int
    longest: int
    bound: float
    worst: float
    faults: tuple[str, ...]


def check_states(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    seed: int = 0,
    time_is_up: Callable[[], bool] = lambda: False,
) -> StateReport:
    """Put each text through a state in random rounds, and compare every row with a fresh pass.

    Args:
        texts: token ids, two or more; one history each. Rounds follow the loop: some right ids,
            some wrong ones, then back to what stands; now and then further back.
        time_is_up: asked between histories; at least one is run.
    """
    source = random.Random(seed)
    rollbacks = rows = longest = done = 0
    worst = bound = 0.0
    faults: list[str] = []
    for text in texts:
        if done and time_is_up():
            break
        done += 1
        longest = max(longest, len(text))
        head = max(1, len(text) - TAIL)
        expected, spread = fresh_rows(model, text, head)
        bound = max(bound, 2 * spread)
        history = _History(model, text, head, source)
        try:
            for start, got in history.run():
                rows += len(got)
                gap = float((got - expected[start - head : start - head + len(got)]).abs().max())
                worst = max(worst, gap)
                if not gap <= bound:
                    raise ArithmeticError(
                        f"the logits at position {start} of {len(text)} are {gap:.1e} from those "
                        f"of a fresh pass (admissible: {bound:.1e})"
                    )
        except Exception as error:
            what = str(error) if isinstance(error, ArithmeticError) else repr(error)
            faults.append(f"after {history.rollbacks} rollbacks {what}")
        rollbacks += history.rollbacks
    return StateReport(done, rollbacks, rows, longest, bound, worst, tuple(faults))


def fresh_rows(model: LanguageModel, text: Sequence[int], head: int) -> tuple[torch.Tensor, float]:
    """Logits after each token from `head` on, and how much they depend on the width of passes.

    Returns:
        ((len(text) - head, vocab size), from passes of one token; largest difference to the rows of
        wider passes).
    """
    exact = bool(getattr(model, "width_exact", False))
    first: torch.Tensor | None = None
    spread = 0.0
    for width in (1, 9) if exact else (1, 2, 3, 5, 9, MOST_BACK + MOST_DRAFTED):
        state = model.new_state()
        try:
            model.extend([(state, list(text[:head]), 0)])
            parts = []
            for start in range(head, len(text), width):
                new = list(text[start : start + width])
                parts.append(model.extend([(state, new, len(new))])[0].float().cpu())
        finally:
            state.close()
        rows = torch.cat(parts)
        if first is None:
            first = rows
        spread = max(spread, float((rows - first).abs().max()))
    assert first is not None
    return first, spread


class _History:
    """One state and the rounds it goes through."""

    def __init__(
        self, model: LanguageModel, text: Sequence[int], head: int, source: random.Random
    ) -> None:
        self._model, self._text, self._head, self._source = model, list(text), head, source
        self.rollbacks = 0

    def run(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(position of the first row, rows) of committed tokens, as each round produced them."""
        text, head, source = self._text, self._head, self._source
        state = self._model.new_state()
        try:
            self._model.extend([(state, text[:head], 0)])
            self._model.extend([(state, source.choices(text, k=MOST_BACK), 0)])
            self._back(state, head)  # a prompt whose draft was wholly wrong
            committed = head + 1
            while committed < len(text):
                right = text[committed : committed + source.randint(0, MOST_DRAFTED)]
                wrong = source.choices(text, k=source.randint(0, MOST_DRAFTED - len(right)))
                new = text[state.length : committed] + right + wrong
                rows = self._model.extend([(state, new, len(right) + len(wrong) + 1)])[0]
                yield committed - 1, rows[: len(right) + 1].float().cpu()
                committed += source.randint(0, len(right)) + 1
                self._back(state, min(committed, len(text)) - 1)
                if source.random() < 0.2:  # as in a conversation that is edited
                    lowest = max(head, state.length - MOST_BACK)
                    self._back(state, source.randint(lowest, state.length))
        finally:
            state.close()

    def _back(self, state: ModelState, length: int) -> None:
        state.rollback(length)
        self.rollbacks += 1
        if state.length != length:
            raise ArithmeticError(f"the state says {state.length} where {length} was asked for")
