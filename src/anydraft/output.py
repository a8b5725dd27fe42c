"""What one sequence has said: text, ids and log-probabilities that agree with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from anydraft.sampling import Sampler
from anydraft.stats import Stats
from anydraft.text import TextStream

if TYPE_CHECKING:
    from anydraft.decode import DecodeSequence
    from anydraft.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one emitted token, natural logarithm.

    Attributes:
        logprob: under the target's own distribution, before any sampling parameter (as OpenAI,
            vLLM and llama.cpp report by default).
        law_logprob: under the law that it was drawn from; 0 at temperature 0.
        top: the most probable ids before any sampling parameter, with their log-probabilities.
    """

    token_id: int
    logprob: float
    law_logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. The pieces of one (prompt_index, choice) add up to it.

    Attributes:
        token_ids: ids whose text is settled with this chunk.
        text: never ends inside a character.
        from_draft: per id whether the draft foresaw it.
        finish_reason: on the last chunk: "stop", "length" or "interrupted".
        stats: on the last chunk.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    from_draft: tuple[bool, ...]
    prompt_index: int
    choice: int
    finish_reason: str | None = None
    stats: Stats | None = None


@dataclass(slots=True)
class _Token:
    token_id: int
    start: int  # byte offset of its first byte in the answer
    from_draft: bool
    logprob: TokenLogprob | None


@dataclass(slots=True, eq=False)
class Output:
    """Turns emitted ids into chunks: no half characters, nothing at or after a stop string.

    A token is released with the text that holds its first byte. The token in which a stop string
    begins is kept, later ones are dropped, so that ids, text and log-probabilities end at the
    same place.
    """

    vocabulary: Vocabulary
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: int | None
    sampler: Sampler
    prompt_ids: list[int]
    prompt_index: int
    choice: int
    _text: TextStream = field(init=False)
    _waiting: list[_Token] = field(default_factory=list)
    _ready: str = ""
    _num_bytes: int = 0
    _all_ids: list[int] = field(default_factory=list)
    _dropped: int = 0

    def __post_init__(self) -> None:
        self._text = TextStream(self.stop)

    def push(self, token_id: int, from_draft: bool, logits: torch.Tensor) -> str | None:
        """Take one emitted id and the logits it was drawn from; a finish reason ends the answer."""
        logprob = None if self.logprobs is None else self._logprob(token_id, logits)
        self._waiting.append(_Token(token_id, self._num_bytes, from_draft, logprob))
        self._all_ids.append(token_id)
        if token_id in self.vocabulary.eos_ids or token_id in self.stop_token_ids:
            return "stop"
        data = self.vocabulary.token_bytes[token_id] or b""
        self._num_bytes += len(data)
        text, stopped = self._text.push(data)
        self._ready += text
        return "stop" if stopped else None

    def chunk(self, sequence: DecodeSequence) -> Chunk | None:
        """What became sure since the last chunk; None if nothing did."""
        reason = sequence.finish_reason
        if reason is not None:
            self._ready += self._text.flush()
            cut = self._text.stop_offset
            if cut is not None:
                kept = [t for t in self._waiting if t.start < cut]
                sequence.stats.generated_tokens -= len(self._waiting) - len(kept)
                self._waiting = kept
        settled = len(self._waiting)
        if reason is None:
            released = self._text.released_bytes
            settled = sum(token.start < released for token in self._waiting)
        taken, self._waiting = self._waiting[:settled], self._waiting[settled:]
        text, self._ready = self._ready, ""
        if not taken and not text and reason is None:
            return None
        return Chunk(
            token_ids=tuple(t.token_id for t in taken),
            text=text,
            logprobs=None
            if self.logprobs is None
            else tuple(t.logprob for t in taken if t.logprob is not None),
            from_draft=tuple(t.from_draft for t in taken),
            prompt_index=self.prompt_index,
            choice=self.choice,
            finish_reason=reason,
            stats=None if reason is None else sequence.stats,
        )

    def _logprob(self, token_id: int, logits: torch.Tensor) -> TokenLogprob:
        row = logits.detach().to("cpu", torch.float64)
        logprobs = row - torch.logsumexp(row, dim=0)
        law = self.sampler.law(logits, self.prompt_ids + self._all_ids)
        count = self.logprobs or 0
        values = logprobs.numpy()
        best = np.argsort(-values, kind="stable")[:count]
        return TokenLogprob(
            token_id=token_id,
            logprob=float(values[token_id]),
            law_logprob=law.log_prob(token_id),
            top=tuple((int(i), float(values[i])) for i in best),
        )
