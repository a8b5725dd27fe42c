"""A model that keeps the books: what the loop had in the target's state at every pass.

The real model runs behind it; every token that goes in and every rollback is written down, and
afterwards compared with what was said. A state that is a token long or holds a rejected draft shows
even where the logits hardly differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anydraft.drafter import Draft, DraftCall, DraftContext
from anydraft.model import Extension, GreedyModel, LanguageModel, ModelState


@dataclass(frozen=True, slots=True)
class Pass:
    """One sequence's part of one pass: all tokens in the state afterwards, and the rows asked."""

    tokens: tuple[int, ...]
    num_rows: int


class LedgerState:
    """The real state, and the tokens that it should hold."""

    __slots__ = ("inner", "tokens")

    def __init__(self, inner: ModelState) -> None:
        self.inner = inner
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return self.inner.length

    def rollback(self, length: int) -> None:
        self.inner.rollback(length)
        del self.tokens[length:]

    def close(self) -> None:
        self.inner.close()


class Ledger:
    """A LanguageModel in front of another one.

    Args:
        model: the real model. Closing the Ledger leaves it open.

    Attributes:
        passes: what went in, in order.
        faults: states whose length was not what the books say.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.name = model.name
        self.runtime = model.runtime
        self.vocabulary = model.vocabulary
        self.vocab_size = model.vocab_size
        self.max_length = model.max_length
        self.passes: list[Pass] = []
        self.faults: list[str] = []

    def new_state(self) -> LedgerState:
        return LedgerState(self.model.new_state())

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        rows = self.model.extend(self._inner(batch))
        self._note(batch)
        return rows

    def _inner(self, batch: Sequence[Extension]) -> list[Extension]:
        """What the real model gets."""
        inner: list[Extension] = []
        for state, token_ids, num_logits in batch:
            assert isinstance(state, LedgerState)
            inner.append((state.inner, token_ids, num_logits))
            if state.inner.length != len(state.tokens):
                self.faults.append(
                    f"a state of {len(state.tokens)} tokens says it holds {state.inner.length}"
                )
        return inner

    def _note(self, batch: Sequence[Extension]) -> None:
        """Write a pass down, once it is done."""
        for state, token_ids, num_logits in batch:
            assert isinstance(state, LedgerState)
            state.tokens.extend(token_ids)
            self.passes.append(Pass(tuple(state.tokens), num_logits))

    def start(self) -> None:
        """Open new books."""
        self.passes, self.faults = [], []

    def audit(self, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
        """What is wrong with the passes of one finished sequence, in words; nothing if all is well.

        Every pass scores one position after the committed tokens and one after each drafted one,
        so what lies before its first row must be what was said.
        """
        said = [*prompt, *output]
        found = list(self.faults)
        for number, entry in enumerate(self.passes, start=1):
            committed = len(entry.tokens) - entry.num_rows + 1
            held, expected = entry.tokens[:committed], said[:committed]
            where = next((i for i, pair in enumerate(zip(held, expected, strict=False))
                          if pair[0] != pair[1]), None)  # fmt: skip
            if where is not None:
                found.append(
                    f"round {number}: the target's state holds id {held[where]} at position "
                    f"{where}, where the text has {expected[where]}"
                )
            elif committed > len(said):
                found.append(f"round {number}: the target's state holds more than was said")
        return found

    def close(self) -> None:
        """Nothing to free: the real model belongs to the caller."""


class GreedyLedger(Ledger):
    """The same in front of a model that finds arg-maxes without logits, as the loop runs it."""

    def extend_greedy(
        self, batch: Sequence[Extension], forbidden: Sequence[Sequence[int] | None]
    ) -> list[torch.Tensor]:
        assert isinstance(self.model, GreedyModel)
        rows = self.model.extend_greedy(self._inner(batch), forbidden)
        self._note(batch)
        return rows


def ledger_of(model: LanguageModel) -> Ledger:
    """A Ledger that can do what the model can."""
    return GreedyLedger(model) if isinstance(model, GreedyModel) else Ledger(model)


class WaywardDrafter:
    """Drafts what plain decoding is known to say, and goes astray now and then.

    So every number of accepted tokens occurs, whatever the user's draft is worth.

    Args:
        answer: prompt and plain output, target ids.
        every: about one drafted id in so many is wrong.
    """

    name = "wayward"

    def __init__(self, answer: Sequence[int], every: int = 4) -> None:
        self._answer = list(answer)
        self._every = every

    def new_session(self, context: DraftContext) -> _WaywardSession:
        return _WaywardSession()

    def draft(self, batch: Sequence[DraftCall]) -> list[Draft]:
        return [Draft(self._propose(len(tokens), count)) for _, tokens, count in batch]

    def _propose(self, length: int, count: int) -> list[int]:
        ahead = self._answer[length : length + count]
        ahead += self._answer[: count - len(ahead)]
        for index in range(len(ahead)):
            if (length * 7 + index * 3) % self._every == 0:
                wrong = self._answer[(length + index * index) % len(self._answer)]
                ahead[index] = wrong
        return ahead

    def close(self) -> None:
        """Nothing to free."""


class _WaywardSession:
    tokens_processed = 0

    def close(self) -> None:
        """Nothing to free."""
