"""Drafts from a smaller model that shares the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from anydraft.drafter import Draft, DraftCall, DraftContext, DraftSettings
from anydraft.drafters.proposal_laws import PieceTable, shared_table
from anydraft.drafters.steps import Chooser, ModelSession, left_out, run_round
from anydraft.drafters.sync import TokenTrack
from anydraft.model import LanguageModel
from anydraft.sampling import SamplingParams

if TYPE_CHECKING:
    from anydraft.vocabulary import Comparison


class SharedIds:
    """Target id <-> draft id where the two vocabularies are one for all practical purposes.

    Args:
        model: the draft.
        comparison: target against draft; None: the very same vocabulary.
        settings: which tokens the draft may draw, among others.
    """

    def __init__(
        self, model: LanguageModel, comparison: Comparison | None, settings: DraftSettings
    ) -> None:
        self.settings = settings
        vocabulary = model.vocabulary
        self._size = vocabulary.size
        self.to_draft: list[int] | None = None
        self.to_target: list[int] | None = None
        self.forbidden: Sequence[int] = ()
        # A foreign id is fed as something harmless of the same length, one id.
        self.substitute = vocabulary.ids_by_bytes.get(b" ", vocabulary.roles.get("unk", 0))
        if comparison is not None:
            self.to_draft = comparison.target_to_draft.tolist()
            self.to_target = comparison.draft_to_target.tolist()
            self.forbidden = np.flatnonzero(comparison.draft_to_target < 0).tolist()
        to_target = self.to_target or range(self._size)
        self.left_out: list[int] = left_out(vocabulary, to_target, settings).tolist()
        self.forbidden = [*self.forbidden, *self.left_out]

    @cached_property
    def table(self) -> PieceTable:
        """What each draft id proposes."""
        return shared_table(self.to_target or range(self._size))

    def draft_id(self, target_id: int) -> int:
        if self.to_draft is None:
            return target_id
        known = self.to_draft[target_id] if target_id < len(self.to_draft) else -1
        return known if known >= 0 else self.substitute

    def target_id(self, draft_id: int) -> int:
        return draft_id if self.to_target is None else self.to_target[draft_id]


class DraftModelSession(ModelSession):
    """One sequence. `ids[i]` stands for `tokens[dropped + i]`; drafted ids follow the last."""

    def __init__(self, model: LanguageModel, shared: SharedIds, context: DraftContext) -> None:
        super().__init__(model, context)
        self._shared = shared
        self._prompt_length = len(context.prompt_ids)
        self._track = TokenTrack(model.vocabulary.token_bytes, self._prompt_length)
        self._chooser = Chooser(
            model,
            _in_draft_ids(context, shared),
            self._prompt_length,
            context.noise,
            shared.forbidden,
            shared.settings,
        )
        self._dropped = 0
        self._position = 0

    def _reset(self) -> None:
        super()._reset()
        self._dropped = 0

    def _open(self, tokens: Sequence[int], count: int) -> bool:
        before = len(self._track.tokens)
        known = self._track.common(tokens)
        to_draft = self._shared.draft_id
        for index in range(known, len(tokens)):
            self._track.append(tokens[index])
        if known < self._dropped or not self.ids:
            self._reset()
            known = 0
        elif known < before:  # what follows was the target's text, not a draft
            self._forget(known - self._dropped)
        # What was drafted and then accepted is already there, and so perhaps are drafts beyond it.
        agreed = known - self._dropped
        total = len(tokens) - self._dropped
        while agreed < min(len(self.ids), total) and self.ids[agreed] == to_draft(
            tokens[self._dropped + agreed]
        ):
            agreed += 1
        if agreed < total:
            self._forget(agreed)
            self.ids += [to_draft(token) for token in tokens[self._dropped + agreed :]]
        if not self.ids:
            return False
        self._slide(len(tokens), count)
        self._position = self._track.position
        for drafted in self.ids[len(tokens) - self._dropped :]:
            self._position += self._bytes_of(drafted)
        return True

    def _slide(self, length: int, count: int) -> None:
        """Keep ids and a draft of `count` within the draft's window; the target's is its own."""
        window = self._model.max_length
        if window is None or length - self._dropped + min(count, window // 2) <= window:
            return
        # Half the window at once, so that feeding it again costs one id per new token on average.
        keep = max(1, window // 2)
        tokens = self._track.tokens
        self._reset()
        self._dropped = length - min(keep, length)
        self.ids = [self._shared.draft_id(token) for token in tokens[self._dropped :]]
        assert self._chooser is not None
        self._chooser.sampler.prompt_length = max(0, self._prompt_length - self._dropped)

    def _bytes_of(self, draft_id: int) -> int:
        return max(1, len(self._model.vocabulary.token_bytes[draft_id] or b""))

    def _num_drafted(self) -> int:
        return len(self.ids) - (len(self._track.tokens) - self._dropped)

    def _wants_more(self) -> bool:
        window = self._model.max_length
        return (
            self._num_drafted() < self._count
            and (window is None or len(self.ids) <= window)
            and not (self._num_drafted() and self.ids[-1] in self._model.vocabulary.eos_ids)
        )

    def _take(self, logits: torch.Tensor) -> None:
        assert self._chooser is not None
        chosen = self._chooser.choose(logits, self.ids, self._position)
        self.ids.append(chosen)
        self._position += self._bytes_of(chosen)

    def _candidates(self) -> list[int]:
        drafted = self.ids[len(self._track.tokens) - self._dropped :]
        return [self._shared.target_id(draft_id) for draft_id in drafted[: self._count]]


def _in_draft_ids(context: DraftContext, shared: SharedIds) -> SamplingParams:
    """The target's parameters; what names an id that the draft lacks is left out."""
    sampling = context.sampling
    if shared.to_draft is None:
        return sampling
    to_draft = shared.to_draft
    return replace(
        sampling,
        logit_bias={to_draft[t]: b for t, b in sampling.logit_bias.items() if to_draft[t] >= 0},
        bad_words=tuple(
            tuple(to_draft[t] for t in word)
            for word in sampling.bad_words
            if all(to_draft[t] >= 0 for t in word)
        ),
    )


class DraftModelDrafter:
    """Drafts with a model whose ids mean what the target's mean.

    Args:
        model: the draft.
        comparison: `compare(target vocabulary, draft vocabulary)`; ids that differ or are padding
            on either side are never drafted. None: the two vocabularies are one.
        settings: how it drafts.
    """

    def __init__(
        self,
        model: LanguageModel,
        comparison: Comparison | None = None,
        settings: DraftSettings | None = None,
    ) -> None:
        self.name = model.name
        self.model = model
        self.settings = settings or DraftSettings()
        self._shared = SharedIds(model, comparison, self.settings)
        self.left_out = self._shared.left_out
        alike = "the draft has the target's vocabulary: use the law 'same'"
        self.laws = {"same": "", **dict.fromkeys(("union", "tli", "ttp", "slrs"), alike)}

    def new_session(self, context: DraftContext) -> DraftModelSession:
        """A session; the model is not touched before the first draft."""
        if context.law is not None:
            from anydraft.drafters.proposal import SharedLawSession, check_law

            check_law(context.law, self.laws, self.name)
            return SharedLawSession(self.model, self._shared, context, self._shared.table)
        return DraftModelSession(self.model, self._shared, context)

    def draft(self, batch: Sequence[DraftCall]) -> list[Draft]:
        """One draft per sequence; every step is one pass of the model over all that go on."""
        calls = []
        for session, tokens, count in batch:
            assert isinstance(session, DraftModelSession)
            calls.append((session, tokens, count))
        return run_round(self.model, calls)

    def close(self) -> None:
        """Free the model."""
        self.model.close()
