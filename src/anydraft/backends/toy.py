"""Exact table models, so that docs, tests and newcomers need no weights.

A toy model is a function from the tokens so far to a row of scores. `random_logits` makes one
that is as good as any small language model for testing: deterministic, context-dependent, cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from anydraft.errors import RollbackError, StateError
from anydraft.model import Extension
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

    def _check(self, batch: Sequence[Extension]) -> None:
        seen: set[int] = set()
        for state, token_ids, num_logits in batch:
            if not isinstance(state, ToyState) or state.closed or state.owner is not self:
                raise StateError("a state that is closed or belongs to another model")
            if id(state) in seen:
                raise StateError("a state appears twice in one batch")
            seen.add(id(state))
            if not token_ids or not 0 <= num_logits <= len(token_ids):
                raise StateError(f"{len(token_ids)} new tokens, {num_logits} rows of logits asked")
            if not all(0 <= token_id < self.vocab_size for token_id in token_ids):
                raise StateError(f"an id outside the vocabulary of {self.vocab_size}: {token_ids}")
            if self.max_length is not None and state.length + len(token_ids) > self.max_length:
                raise StateError(f"the context of {self.max_length} tokens is full")

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        self._check(batch)
        results: list[torch.Tensor] = []
        for state, token_ids, num_logits in batch:
            before = tuple(state.tokens)  # type: ignore[attr-defined]
            start = len(token_ids) - num_logits
            rows = [
                self.logits_fn(before + tuple(token_ids[: i + 1]))
                for i in range(start, len(token_ids))
            ]
            results.append(torch.tensor(rows, dtype=torch.float32).reshape(-1, self.vocab_size))
        for state, token_ids, _ in batch:
            state.tokens.extend(token_ids)  # type: ignore[attr-defined]
            self.tokens_processed += len(token_ids)
        return results


def random_logits(size: int, seed: int, scale: float = 2.0, context: int = 4) -> LogitsFn:
    """Scores that depend on the last `context` tokens and on nothing else."""

    def logits(tokens: tuple[int, ...]) -> list[float]:
        generator = np.random.default_rng([seed, *tokens[-context:]])
        row: list[float] = (generator.standard_normal(size) * scale).tolist()
        return row

    return logits
