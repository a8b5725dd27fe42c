"""A target whose verification is forced to be serial: each new token in a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anydraft.model import Extension

MOST = 32
"""Longer extensions are prompts, which are read as usual."""


class SerialTarget:
    """Another target, with the same results; only how its passes are cut differs.

    Args:
        model: the target; everything but its passes is its own.
    """

    origin: dict[str, Any] = {}  # its costs are not the model's: no profile of them is kept

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.model, name)
        return self._extend_greedy if name == "extend_greedy" else value

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        """One pass per token of a verification, one for a prompt."""
        return [_one_by_one(self.model.extend, extension) for extension in batch]

    def _extend_greedy(
        self, batch: Sequence[Extension], forbidden: Sequence[Sequence[int] | None]
    ) -> list[torch.Tensor]:
        return [
            _one_by_one(lambda one, mask=mask: self.model.extend_greedy(one, [mask]), extension)
            for extension, mask in zip(batch, forbidden, strict=True)
        ]


def _one_by_one(
    run: Callable[[list[Extension]], list[torch.Tensor]], extension: Extension
) -> torch.Tensor:
    state, ids, num_logits = extension
    if not 1 < len(ids) <= MOST:
        return run([extension])[0]
    before = state.length
    rows = []
    try:
        for index, token_id in enumerate(ids):
            wanted = index >= len(ids) - num_logits
            rows += run([(state, [token_id], int(wanted))])
    except BaseException:
        state.rollback(before)
        raise
    return torch.cat(rows)
