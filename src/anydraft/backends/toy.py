"""Exact table models, so that docs, tests and newcomers need no weights.

A toy model is a function from the tokens so far to a row of scores. `random_logits` makes one
that is as good as any small language model for testing: deterministic, context-dependent, cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from anydraft.errors import RollbackError, StateError
from anydraft.model import Extension, checked_states
from anydraft.vocabulary import Vocabulary

LogitsFn = Callable[[tuple[int, ...]], Sequence[float]]


class ToyState:
    """The tokens themselves: the simplest state there is."""

    def __init__(self, owner: ToyModel) -> None:
        self.owner = owner
        self.tokens: list[int] = []
        self.closed = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rollback(self, length: int) -> None:
        if self.closed:
            raise StateError("this state is closed")
        if not 0 <= length <= len(self.tokens):
            raise RollbackError(f"cannot roll back to {length}: the state holds {self.length}")
        del self.tokens[length:]

    def close(self) -> None:
        self.closed = True
        self.tokens.clear()


class ToyModel:
    """A language model given by a function.

    Args:
        vocabulary: its size is the width of the rows.
        logits_fn: tokens so far (never empty) -> `vocabulary.size` scores of the next one.
        max_length: context limit, or None.
    """

    runtime = "toy"
    closed = False

    def __init__(
        self,
        vocabulary: Vocabulary,
        logits_fn: LogitsFn,
        max_length: int | None = None,
        name: str = "toy",
    ) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.logits_fn = logits_fn
        self.max_length = max_length
        self.name = name
        self.tokens_processed = 0

    def new_state(self) -> ToyState:
        return ToyState(self)

    def close(self) -> None:
        """Nothing to free."""

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        states = checked_states(self, batch, ToyState)
        results: list[torch.Tensor] = []
        for state, (_, token_ids, num_logits) in zip(states, batch, strict=True):
            before = tuple(state.tokens)
            start = len(token_ids) - num_logits
            rows = [
                self.logits_fn(before + tuple(token_ids[: i + 1]))
                for i in range(start, len(token_ids))
            ]
            results.append(torch.tensor(rows, dtype=torch.float32).reshape(-1, self.vocab_size))
        for state, (_, token_ids, _) in zip(states, batch, strict=True):
            state.tokens.extend(token_ids)
            self.tokens_processed += len(token_ids)
        return results


def random_logits(size: int, seed: int, scale: float = 2.0, context: int = 4) -> LogitsFn:
    """Scores that depend on the last `context` tokens and on nothing else."""

    def logits(tokens: tuple[int, ...]) -> list[float]:
        generator = np.random.default_rng([seed, *tokens[-context:]])
        row: list[float] = (generator.standard_normal(size) * scale).tolist()
        return row

    return logits
