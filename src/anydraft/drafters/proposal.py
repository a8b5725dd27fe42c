"""Sessions whose drafts carry the laws that they were drawn from.

They read the text as the sessions without laws do. What differs is the drawing: every step draws
one outcome of the draft's law with the round's own noise, its target ids are proposed with their
laws, and nothing that was drawn is dropped, re-cut or kept for a later round. When to stop depends
only on what was proposed before, never on the next draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anydraft.drafter import Draft, DraftContext, DraftLaw
from anydraft.drafters.cross_vocabulary import Bridge, CrossVocabularySession
from anydraft.drafters.draft_model import DraftModelSession, SharedIds
from anydraft.drafters.proposal_laws import LOOKAHEAD, PieceTable, ends_draft
from anydraft.drafters.steps import ModelSession
from anydraft.errors import RequestError
from anydraft.model import LanguageModel

if TYPE_CHECKING:
    from anydraft.noise import Noise


def check_law(law: str, reasons: dict[str, str], name: str) -> None:
    """Refuse a law that does not apply.

    Raises:
        RequestError: in words.
    """
    if law not in reasons:
        raise RequestError(f"no proposal law is called {law!r}; there are {', '.join(reasons)}")
    if reasons[law]:
        raise RequestError(f"{name} cannot draft by {law!r}: {reasons[law]}")


class _Round:
    """The proposals of one round, as they are drawn.

    Attributes:
        over: nothing can follow the last proposal.
    """

    def __init__(self, table: PieceTable, noise: Noise | None, end_ids: frozenset[int]) -> None:
        assert noise is not None
        self._table = table
        self._noise = noise
        self._end_ids = end_ids
        self.begin(0)

    def begin(self, start: int) -> None:
        """A new round, after `start` committed tokens."""
        self._start = start
        self._step = 0
        self.token_ids: list[int] = []
        self.laws: list[DraftLaw] = []
        self.over = False

    def draw(self, probs: Any) -> int:
        """Draw an outcome of `probs` and propose what it stands for."""
        outcome = self._noise.pick(probs, "draft", self._start, self._step)
        self._step += 1
        ids, laws = self._table.proposals(probs, outcome)
        self.token_ids += ids
        self.laws += laws
        self.over = self.over or not ids or not self._end_ids.isdisjoint(ids)
        return outcome

    def draft(self, count: int) -> Draft:
        """The first `count` proposals. How many there are was settled before any was drawn."""
        return Draft(self.token_ids[:count], self.laws[:count])


class _LawSession(ModelSession):
    """What is the same with and without a bridge."""

    _round: _Round

    def begin(self, tokens: Sequence[int], count: int) -> bool:
        """Open a round; False when there is nothing to run."""
        self._round.begin(len(tokens))
        self._asked = count
        return super().begin(tokens, count)

    @property
    def has_drawn(self) -> bool:
        """Whether something was drawn this round that must be proposed, whatever happens."""
        return bool(self._round.laws)

    def finish(self) -> Draft:
        """The round's draft. What was drawn before a failure is proposed all the same."""
        if self._count and not self._failed:
            self._failures_in_a_row = 0
        return self._round.draft(self._asked)

    def _unfinished(self) -> bool:
        return not self._round.over and len(self._round.laws) < self._count


class SharedLawSession(_LawSession, DraftModelSession):
    """One sequence whose draft has the target's vocabulary; the law `same`."""

    def __init__(
        self, model: LanguageModel, shared: SharedIds, context: DraftContext, table: PieceTable
    ) -> None:
        super().__init__(model, shared, context)
        self._round = _Round(table, context.noise, frozenset())

    def _open(self, tokens: Sequence[int], count: int) -> bool:
        if not super()._open(tokens, count):
            return False
        self._forget(len(tokens) - self._dropped)  # drafts beyond the text are not drawn again
        return True

    def _wants_more(self) -> bool:
        return self._unfinished() and super()._wants_more()

    def _take(self, logits: torch.Tensor) -> None:
        assert self._chooser is not None
        law = self._chooser.law(logits, self.ids)
        self.ids.append(self._round.draw(law.array(len(logits))))


class BridgedLawSession(_LawSession, CrossVocabularySession):
    """One sequence whose draft has a vocabulary of its own."""

    def __init__(
        self,
        model: LanguageModel,
        bridge: Bridge,
        context: DraftContext,
        table: PieceTable,
        lookahead: int,
    ) -> None:
        super().__init__(model, bridge, context, keep_unfinished=True, keep_drafts=False)
        self._round = _Round(table, context.noise, bridge.target.eos_ids)
        self._lookahead = lookahead
        if context.law in ("tli", "ttp"):
            self._forbidden = [*self._forbidden, *table.silent.tolist()]

    def _open(self, tokens: Sequence[int], count: int) -> bool:
        # With half a character that the draft cannot read there is no draft this round, which is
        # settled before anything is drawn.
        return super()._open(tokens, count) and self._text is not None and not self._text.gap

    def _wants_more(self) -> bool:
        window = self._model.max_length
        room = window is None or len(self.ids) + self._lookahead <= window + 1
        return self._unfinished() and room and not self._ended

    def _take(self, logits: torch.Tensor) -> None:
        assert self._text is not None
        outcome = self._round.draw(self._outcomes(logits, [], self._lookahead))
        self._rewind(len(self.ids))  # what was looked at is not what was drawn
        size = self._bridge.draft.size
        for digit in reversed(range(self._lookahead)):
            draft_id = outcome // size**digit % size
            self._ended = ends_draft(self._bridge, draft_id)
            if self._ended:
                return
            self._text.push(draft_id)

    def _outcomes(self, logits: torch.Tensor, path: list[int], depth: int) -> Any:
        """Probabilities of all sequences of `depth` draft ids after `path`, the first id slowest.

        After an id that ends the draft only the first of its sequences stands for it.
        """
        assert self._chooser is not None
        probs = self._chooser.law(logits, [*self.ids, *path]).array(len(logits))
        if depth == 1:
            return probs
        result = np.zeros((len(probs), len(probs) ** (depth - 1)), dtype=probs.dtype)
        for draft_id in np.flatnonzero(probs).tolist():
            if ends_draft(self._bridge, draft_id):
                result[draft_id, 0] = probs[draft_id]
                continue
            longer = [*path, draft_id]
            state = self._rewind(len(self.ids) + len(path))
            row = self._model.extend([(state, [draft_id], 1)])[0][0]
            self.tokens_processed += 1
            self.passes += 1
            result[draft_id] = probs[draft_id] * self._outcomes(row, longer, depth - 1)
        return result.reshape(-1)


def lookahead_of(law: str) -> int:
    """How many draft tokens one draw of a law settles."""
    return LOOKAHEAD if law == "slrs" else 1
