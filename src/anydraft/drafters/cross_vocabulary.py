"""Drafts from any model with any tokenizer, byte-exact.

The draft reads the target's text as bytes in its own ids, in its own chat template, and what it
says is written in target ids by the target's own tokenizer. The acceptance test is the target's
(Timor et al. 2025, arXiv 2502.05202, string-level exact match), so a wrong guess here costs speed
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from anydraft.drafter import Draft, DraftCall, DraftContext, DraftSettings
from anydraft.drafters.bridge import DraftText, SourceText, unfinished_character
from anydraft.drafters.proposal_laws import PieceTable, bridge_table, law_reasons
from anydraft.drafters.retokenise import Retokeniser
from anydraft.drafters.steps import Chooser, ModelSession, left_out, run_round
from anydraft.drafters.sync import TokenTrack
from anydraft.errors import AnydraftError
from anydraft.model import LanguageModel
from anydraft.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from anydraft.vocabulary import Comparison, Vocabulary

_MORE_STEPS = 3  # beyond the ids asked for: bytes that are owed make no candidates
_SPOKEN_ROLES = ("bos", "start_of_turn", "end_of_turn", "eos")


class Bridge:
    """What all sessions of a pair of vocabularies share: tables between the two.

    Args:
        target, draft: the vocabularies.
        comparison: `compare(target, draft)`.
        settings: how the draft drafts.
    """

    def __init__(
        self,
        target: Vocabulary,
        draft: Vocabulary,
        comparison: Comparison,
        settings: DraftSettings | None = None,
    ) -> None:
        self.settings = settings or DraftSettings()
        self.target = target
        self.draft = draft
        self.to_draft: list[int] = comparison.target_to_draft.tolist()
        self.to_target: list[int] = comparison.draft_to_target.tolist()
        self.left_out: list[int] = left_out(draft, self.to_target, self.settings).tolist()
        self.retokeniser = Retokeniser(target)
        self.laws = law_reasons(target, draft, comparison)
        self._sizes: dict[int, int] = {}
        self._tables: dict[tuple[str, bool], PieceTable] = {}
        pairs = [
            comparison.roles_matched[r] for r in _SPOKEN_ROLES if r in comparison.roles_matched
        ]
        self.draft_controls = dict(pairs)
        self.target_controls = {draft_id: target_id for target_id, draft_id in reversed(pairs)}
        draft_end = self._end(draft, chat=True)
        if draft_end is not None:
            for target_id in target.eos_ids:
                self.draft_controls.setdefault(target_id, draft_end)
        self.draft_ends = draft.eos_ids | {
            draft.roles[role] for role in ("eos", "end_of_turn") if role in draft.roles
        }

    def _end(self, vocabulary: Vocabulary, *, chat: bool) -> int | None:
        """The id that ends a turn (in a chat) or a text."""
        order = ("end_of_turn", "eos") if chat else ("eos", "end_of_turn")
        found = [vocabulary.roles[role] for role in order if role in vocabulary.roles]
        ending = [token_id for token_id in found if token_id in vocabulary.eos_ids]
        return next(iter([*ending, *sorted(vocabulary.eos_ids), *found]), None)

    def target_end(self, *, chat: bool) -> int | None:
        """What the draft's end proposes."""
        return self._end(self.target, chat=chat)

    def start_id(self) -> int | None:
        """A draft id to feed where there is no text at all."""
        draft = self.draft
        roles = [draft.roles[role] for role in ("bos", "eos", "end_of_turn") if role in draft.roles]
        known = [draft.bos_id] if draft.bos_id is not None else []
        return next(iter([*known, *roles, *sorted(draft.eos_ids)]), None)

    def num_target_ids(self, draft_id: int) -> int:
        """Target ids that a draft id's bytes make on their own."""
        if self.to_target[draft_id] >= 0:
            return 1
        size = self._sizes.get(draft_id)
        if size is None:
            size = max(1, len(self.target.encode(self.draft.token_bytes[draft_id] or b"")))
            self._sizes[draft_id] = size
        return size

    def table(self, law: str, *, chat: bool) -> PieceTable:
        """The table of a proposal law, made once; union and tli share theirs."""
        key = "tli" if law == "union" else law, chat
        if key not in self._tables:
            self._tables[key] = bridge_table(self, law, chat=chat)
        return self._tables[key]

    def sampling_in_draft_ids(self, sampling: SamplingParams) -> SamplingParams:
        """The target's parameters; bans and biases by bytes where the draft has them."""
        bias: dict[int, float] = {}
        for token_id, value in sampling.logit_bias.items():
            draft_id = self.draft_controls.get(token_id, self.to_draft[token_id])
            if draft_id >= 0:
                bias[draft_id] = value
        words = [self._word_in_draft_ids(word) for word in sampling.bad_words]
        return replace(
            sampling,
            logit_bias=bias,
            bad_words=tuple(word for word in words if word),
            processors=(),  # they act on the target's ids
        )

    def _word_in_draft_ids(self, word: Sequence[int]) -> tuple[int, ...]:
        pieces = [self.target.token_bytes[token_id] for token_id in word]
        if len(word) == 1 and word[0] in self.draft_controls:
            return (self.draft_controls[word[0]],)
        if any(piece is None for piece in pieces):
            return ()
        return tuple(self.draft.encode(b"".join([piece or b"" for piece in pieces])))


class CrossVocabularySession(ModelSession):
    """One sequence: the target's text as the draft reads it, and what the draft says next."""

    def __init__(
        self,
        model: LanguageModel,
        bridge: Bridge,
        context: DraftContext,
        keep_unfinished: bool,
        keep_drafts: bool = True,
    ) -> None:
        super().__init__(model, context)
        self._bridge = bridge
        self._context = context
        self._keep_unfinished = keep_unfinished
        self._keep_drafts = keep_drafts
        self._forbidden: Sequence[int] = bridge.left_out  # draft ids that are never drawn
        prompt = context.prompt_ids
        self._track = TokenTrack(bridge.target.token_bytes, len(prompt))
        if context.messages is not None:
            skip = len(prompt)  # the draft has the conversation in its own template
        else:
            skip = int(len(prompt) > 0 and prompt[0] == bridge.target.bos_id)
        self._source = SourceText(bridge.target, bridge.draft_controls, skip)
        self._end_id = bridge.target_end(chat=context.messages is not None)
        self._sampler = Sampler(context.sampling, bridge.target, len(prompt))
        self._masks = bool(
            context.sampling.bad_words
            or context.sampling.min_tokens
            or context.sampling.ignore_eos
            or any(bias == -math.inf for bias in context.sampling.logit_bias.values())
        )
        self._text: DraftText | None = None
        self._position = 0
        self._estimate = 0  # candidates that the drafted ids will make
        self._owed = 0  # bytes of the source that the next drafted id must repeat
        self._last: int | None = None  # control id of the target that ends this round's draft
        self._ended = False
        self._steps = 0
        self._tail = b""  # last drafted bytes: half a character is no candidate yet

    def _reset(self) -> None:
        super()._reset()
        self._text = None

    def _open(self, tokens: Sequence[int], count: int) -> bool:
        self._last, self._ended, self._steps = None, False, 0
        known = self._track.common(tokens)
        self._source.truncate(known)
        if self._text is not None and not self._text.source_truncated():
            self._reset()
        for index in range(known, len(tokens)):
            self._track.append(tokens[index])
            self._source.append(tokens[index])
        if self._text is None:
            self._text = self._new_text()
        unchanged = self._text.follow_source(keep_drafts=self._keep_drafts)
        self.ids = self._text.ids
        if not self.ids:
            return False
        if self._state is not None:
            self._rewind(unchanged)
        if self._chooser is None:
            sampling = self._bridge.sampling_in_draft_ids(self._context.sampling)
            self._chooser = Chooser(
                self._model,
                sampling,
                len(self.ids),
                self._context.noise,
                self._forbidden,
                self._bridge.settings,
            )
        self._slide(count)
        self._estimate, self._owed, self._tail = 0, self._text.gap, b""
        for draft_id in self.ids[self._text.num_confirmed :]:
            self._count_in(draft_id)
        self._position = max(0, self._track.position - self._text.gap + len(self._text.drafted))
        return True

    def _new_text(self) -> DraftText:
        draft, messages = self._bridge.draft, self._context.messages
        if messages is None:
            prefix = list(draft.prompt_prefix)
            if not prefix and not self._source.data:
                start = self._bridge.start_id()
                prefix = [] if start is None else [start]
            return DraftText(draft, self._source, prefix, continuation=False)
        try:
            prefix = draft.encode_chat(messages)
        except AnydraftError:
            prefix = draft.encode_prompt(transcript(messages))
        return DraftText(draft, self._source, prefix, continuation=True)

    def _slide(self, count: int) -> None:
        """Keep ids and a draft of `count` within the draft's window; the target's is its own."""
        window = self._model.max_length
        if window is None or self._text is None:
            return
        if len(self.ids) + min(count, window // 2) <= window:
            return
        # Half the window at once, so that feeding it again costs one id per new token on average.
        keep = max(1, window // 2)
        fixed = len(self._bridge.draft.prompt_prefix) if keep > 1 else 0
        dropped = self._text.drop_front(keep - fixed, fixed)
        if dropped:
            self._rewind(0)
            if self._chooser is not None:
                sampler = self._chooser.sampler
                sampler.prompt_length = max(0, sampler.prompt_length - dropped)

    def _wants_more(self) -> bool:
        window = self._model.max_length
        return (
            not self._ended
            and (self._estimate < self._count or unfinished_character(self._tail) > 0)
            and self._steps <= self._count + _MORE_STEPS
            and (window is None or len(self.ids) <= window)
        )

    def _take(self, logits: torch.Tensor) -> None:
        assert self._text is not None and self._chooser is not None
        bridge = self._bridge
        self._steps += 1
        chosen = self._chooser.choose(logits, self.ids, self._position)
        piece = bridge.draft.token_bytes[chosen]
        if piece is None or chosen in bridge.draft_ends:
            self._ended = True
            ends = chosen in bridge.draft_ends
            self._last = self._end_id if ends else bridge.target_controls.get(chosen)
            return
        self._text.push(chosen)
        self._position += max(1, len(piece))
        self._count_in(chosen)

    def _count_in(self, draft_id: int) -> None:
        """Add a drafted id to the estimate of candidates; bytes said already make none."""
        self._tail = (self._tail + (self._bridge.draft.token_bytes[draft_id] or b""))[-4:]
        if not self._owed:
            self._estimate += self._bridge.num_target_ids(draft_id)
            return
        rest = (self._bridge.draft.token_bytes[draft_id] or b"")[self._owed :]
        self._owed = max(0, self._owed - len(self._bridge.draft.token_bytes[draft_id] or b""))
        if rest:
            self._estimate += len(self._bridge.target.encode(rest))

    def _candidates(self) -> list[int]:
        text = self._text
        if text is None:
            return []
        tokens, drafted, gap = self._track.tokens, text.drafted, text.gap
        if gap:
            if drafted[:gap] != self._source.data[text.covered :]:
                return []
            drafted = drafted[gap:]
        half = unfinished_character(drafted)
        drafted = drafted[: len(drafted) - half] or drafted
        ids = self._bridge.retokeniser.candidates(tokens, drafted) if drafted else []
        if drafted and not ids:
            return []
        if self._last is not None:
            ids.append(self._last)
        elif not self._keep_unfinished and len(ids) > 1:
            ids.pop()
        return self._allowed(ids[: self._count])

    def _allowed(self, ids: list[int]) -> list[int]:
        """Candidates before the first that the target's masks forbid, or up to its end."""
        eos = self._bridge.target.eos_ids
        if self._masks:
            prefix = list(self._track.tokens)
            for index, token_id in enumerate(ids):
                if self._sampler.forbids(token_id, prefix):
                    return ids[:index]
                prefix.append(token_id)
        for index, token_id in enumerate(ids):
            if token_id in eos:
                return ids[: index + 1]
        return ids


def transcript(messages: Sequence[dict[str, str]]) -> str:
    """A conversation as plain text, for a draft without a chat template."""
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join([*lines, "assistant:"])


class CrossVocabularyDrafter:
    """Drafts with a model whose tokenizer is not the target's.

    Args:
        model: the draft.
        target_vocabulary: the target's.
        comparison: `compare(target_vocabulary, model.vocabulary)`; made here if not given.
        keep_unfinished: whether the last candidate, which the draft might yet have made longer, is
            proposed too. It costs one more row in the target's pass.
        settings: how it drafts.
    """

    def __init__(
        self,
        model: LanguageModel,
        target_vocabulary: Vocabulary,
        comparison: Comparison | None = None,
        *,
        keep_unfinished: bool = True,
        settings: DraftSettings | None = None,
    ) -> None:
        if comparison is None:
            from anydraft.vocabulary import compare

            comparison = compare(target_vocabulary, model.vocabulary)
        self.name = model.name
        self.model = model
        self.settings = settings or DraftSettings()
        self.bridge = Bridge(target_vocabulary, model.vocabulary, comparison, self.settings)
        self.laws = self.bridge.laws
        self.left_out = self.bridge.left_out
        self._keep_unfinished = keep_unfinished

    def new_session(self, context: DraftContext) -> CrossVocabularySession:
        """A session; the model is not touched before the first draft."""
        if context.law is not None:
            from anydraft.drafters.proposal import BridgedLawSession, check_law, lookahead_of

            check_law(context.law, self.laws, self.name)
            table = self.bridge.table(context.law, chat=context.messages is not None)
            lookahead = lookahead_of(context.law)
            return BridgedLawSession(self.model, self.bridge, context, table, lookahead)
        return CrossVocabularySession(self.model, self.bridge, context, self._keep_unfinished)

    def draft(self, batch: Sequence[DraftCall]) -> list[Draft]:
        """One draft per sequence; every step is one pass of the model over all that go on."""
        calls = []
        for session, tokens, count in batch:
            assert isinstance(session, CrossVocabularySession)
            calls.append((session, tokens, count))
        return run_round(self.model, calls)

    def close(self) -> None:
        """Free the model."""
        self.model.close()
