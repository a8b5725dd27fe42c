"""A target whose verification is forced to be serial: each new token in a pass of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MOST = 32
"""Longer extensions are prompts, which are read as usual."""


class SerialTarget:
    """Another target, with the same results; only how its passes are cut differs.

    Args:
        model: the target; everything but `extend` is its own.
    """

    origin: dict[str, Any] = {}  # its costs are not the model's: no profile of them is kept

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def extend(self, batch: Sequence[tuple[Any, Sequence[int], int]]) -> list[torch.Tensor]:
        """One pass per token of a verification, one for a prompt."""
        return [self._extend(*extension) for extension in batch]

    def _extend(self, state: Any, ids: Sequence[int], num_logits: int) -> torch.Tensor:
        if not 1 < len(ids) <= MOST:
            whole: torch.Tensor = self.model.extend([(state, ids, num_logits)])[0]
            return whole
        before = state.length
        rows = []
        try:
            for index, token_id in enumerate(ids):
                wanted = index >= len(ids) - num_logits
                rows += self.model.extend([(state, [token_id], int(wanted))])
        except BaseException:
            state.rollback(before)
            raise
        return torch.cat(rows)
