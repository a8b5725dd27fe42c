"""A model whose passes are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Pass(NamedTuple):
    """One pass.

    Attributes:
        sequences, tokens, rows: how many took part, new tokens and rows asked for in all.
    """

    sequences: int
    tokens: int
    rows: int
    seconds: float


class TimedModel:
    """A LanguageModel that notes its passes, with logits and without; all else is the model's own.

    Args:
        model: may be a GreedyModel; then this is one too.

    Attributes:
        passes: since the list was last cleared.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.passes: list[Pass] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.model, name)
        return self._timed(value) if name == "extend_greedy" else value

    def extend(self, batch: Sequence[Any]) -> list[Any]:
        """See LanguageModel.extend."""
        return self._timed(self.model.extend)(batch)

    @property
    def seconds(self) -> float:
        """Of all passes noted."""
        return sum(one.seconds for one in self.passes)

    def _timed(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def extend(batch: Sequence[Any], *rest: Any) -> list[Any]:
            started = time.perf_counter()
            result = run(batch, *rest)
            seconds = time.perf_counter() - started
            tokens = sum(len(token_ids) for _, token_ids, _ in batch)
            rows = sum(num_logits for _, _, num_logits in batch)
            self.passes.append(Pass(len(batch), tokens, rows, seconds))
            return result

        return extend
