"""Laws that are worked out once per row of logits, however often they are drawn from.

Turning 262,144 logits into a law costs more than everything else a repeated draw does. While a
`LawMemory` is entered, `Sampler.law` answers a row that it has seen under the same parameters with
the law it gave then. A row is known by its values, not by what it is said to follow, so a loop
that looks at the wrong row still gets the wrong law.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from anydraft.sampling import Law, Sampler

_SAMPLED = 4093  # values of a row that stand for it


class _KeptLaw(Law):
    """A law whose dense form is kept too. Neither form can be written to."""

    __slots__ = ("_array",)

    def __init__(self, law: Law) -> None:
        super().__init__(law.token_ids, law.scores)
        self._array: Any = None
        self.scores.flags.writeable = False

    def array(self, vocab_size: int) -> Any:
        if self._array is None:
            self._array = super().array(vocab_size)
            self._array.flags.writeable = False
        return self._array


class LawMemory:
    """A context in which laws are remembered.

    Only for parameters without penalties, biases, bad words, minimum lengths and processors: with
    those a law depends on more than its row.

    Args:
        most: laws kept; beyond, the memory starts over.
    """

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._laws: dict[Any, Law] = {}
        self._original = Sampler.law

    def __enter__(self) -> LawMemory:
        self._original = original = Sampler.law
        laws = self._laws

        def law(sampler: Sampler, logits: torch.Tensor, tokens: Sequence[int]) -> Law:
            params = sampler.params
            if not plain_parameters(sampler):
                return original(sampler, logits, tokens)
            shape = params.temperature, params.top_k, params.top_p, params.min_p
            key = id(sampler.vocabulary), shape, fingerprint(logits)
            known = laws.get(key)
            if known is None:
                if len(laws) >= self._most:
                    laws.clear()
                known = laws[key] = _KeptLaw(original(sampler, logits, tokens))
            return known

        Sampler.law = law  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        Sampler.law = self._original  # type: ignore[method-assign]
        self._laws.clear()


def plain_parameters(sampler: Sampler) -> bool:
    """Whether the sampler's law depends on the row alone."""
    p = sampler.params
    penalties = p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty
    masks = p.logit_bias or p.bad_words or p.min_tokens or p.ignore_eos or p.processors
    return not (penalties or masks)


def fingerprint(logits: torch.Tensor) -> bytes:
    """What tells one row of a model from another: no two of them share thousands of values."""
    row = logits.detach()
    return row[:: max(1, len(row) // _SAMPLED)].float().cpu().numpy().tobytes()
