"""What drafters with a model share: each draft step is one model pass over all sessions."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from anydraft.drafter import Draft, DraftContext, DraftSettings
from anydraft.drafters.sync import common_length
from anydraft.errors import RollbackError, StateError
from anydraft.model import LanguageModel, ModelState
from anydraft.noise import Noise, draw, token_keys
from anydraft.sampling import Law, Sampler, SamplingParams

if TYPE_CHECKING:
    from anydraft.vocabulary import Vocabulary

log = logging.getLogger(__name__)

Ids: TypeAlias = npt.NDArray[np.int64]

T = TypeVar("T")

_AS_THE_TARGET = DraftSettings()
_ADDED = 1  # TokenKind.ADDED
_MAX_FAILURES = 3  # in a row; then a session stays silent


class ModelSession(ABC):
    """One sequence as the draft model sees it.

    Attributes:
        ids: the draft's own ids: fed, and drafted after them. The state holds a prefix of them.
        tokens_processed: ids fed so far, re-fed ones counted again.
        passes: of the draft model that they were fed in.
        failures: rounds that ended without candidates because something raised.
    """

    def __init__(self, model: LanguageModel, context: DraftContext) -> None:
        self.ids: list[int] = []
        self.tokens_processed = 0
        self.passes = 0
        self.failures = 0
        self.failure: str | None = None
        self._failures_in_a_row = 0
        self._failed = False  # in this round
        self._broken: Exception | None = None  # the model's, raised by the next round
        self._count = 0  # target ids asked for in this round
        self._model = model
        self._chooser: Chooser | None = None
        self._state: ModelState | None = None
        self._inherited: tuple[ModelState, list[int]] | None = None
        self._closed = False
        previous = context.previous
        if isinstance(previous, ModelSession) and previous._model is model:
            self._inherit(previous)

    # What a kind of drafter has to say.

    @abstractmethod
    def _open(self, tokens: Sequence[int], count: int) -> bool:
        """Bring `ids` in line with the target's tokens; False if nothing can be drafted."""

    @abstractmethod
    def _wants_more(self) -> bool:
        """Whether another draft step is worth its cost for the `_count` ids asked for."""

    @abstractmethod
    def _take(self, logits: torch.Tensor) -> None:
        """Choose the next draft id from its logits (vocab,)."""

    @abstractmethod
    def _candidates(self) -> list[int]:
        """The round's proposal in target ids."""

    # What is the same for all.

    def begin(self, tokens: Sequence[int], count: int) -> bool:
        """Open a round; False when there is nothing to run."""
        if self._closed:
            raise StateError("this draft session is closed")
        if self._broken is not None:
            raise self._broken
        self._failed = False
        self._count = 0
        if count <= 0 or self._failures_in_a_row >= _MAX_FAILURES:
            return False

        def open_round() -> bool:
            self._count = count if self._open(tokens, count) else 0
            return self._count > 0 and self._wants_more()

        return self._guarded(open_round, otherwise=False)

    @property
    def has_drawn(self) -> bool:
        """Whether something was drawn this round that must be proposed, whatever happens."""
        return False

    def feed(self) -> tuple[ModelState, list[int], int]:
        """The extension that gives the next step's logits."""
        # At least the last id is fed, since the logits after it are what is wanted.
        state = self._rewind(len(self.ids) - 1)
        return state, self.ids[state.length :], 1

    def step(self, logits: torch.Tensor, num_fed: int) -> bool:
        """Use one step's logits; whether another step is wanted."""
        self.tokens_processed += num_fed
        self.passes += 1

        def take() -> bool:
            if self._chooser is not None and self._chooser.unsure(logits):
                return False  # settled before anything is drawn
            self._take(logits)
            return self._wants_more()

        return self._guarded(take, otherwise=False)

    def finish(self) -> Draft:
        """The round's draft."""
        if self._count == 0 or self._failed:
            return Draft()
        token_ids = self._guarded(self._candidates, otherwise=list[int]())
        if not self._failed:
            self._failures_in_a_row = 0
        return Draft(token_ids)

    def close(self) -> None:
        """Free the draft's state; closing twice is fine."""
        self._closed = True
        self._reset()
        if self._inherited is not None:
            self._inherited[0].close()
            self._inherited = None

    def _inherit(self, previous: ModelSession) -> None:
        """Take over another session's state: what both read alike is not fed again."""
        if previous._state is not None:
            self._inherited = previous._state, previous.ids[: previous._state.length]
            previous._state = None
        else:
            self._inherited, previous._inherited = previous._inherited, None

    def _first_state(self, length: int) -> ModelState:
        """A new state, or the inherited one cut to what agrees with the first `length` ids."""
        if self._inherited is None:
            return self._model.new_state()
        (state, read), self._inherited = self._inherited, None
        agreed = common_length(read, self.ids[:length], same_object=False)
        try:
            state.rollback(agreed)
        except RollbackError:
            state.close()
            return self._model.new_state()
        return state

    def _reset(self) -> None:
        """Forget everything; the next round starts from the whole text again."""
        self.ids = []
        if self._state is not None:
            self._state.close()
            self._state = None

    def _forget(self, length: int) -> None:
        """Keep only the first `length` ids."""
        del self.ids[length:]
        if self._state is not None:
            self._rewind(length)

    def _rewind(self, length: int) -> ModelState:
        """The state, with at most the first `length` ids in it."""
        if self._state is not None and self._state.length > length:
            try:
                self._state.rollback(length)
            except RollbackError:  # out of its reach: feed the text again
                self._state.close()
                self._state = None
        if self._state is None:
            self._state = self._first_state(length)
        return self._state

    def _guarded(self, action: Callable[[], T], otherwise: T) -> T:
        """No failure inside a session may reach the target: it is no candidates, and is counted."""
        try:
            return action()
        except Exception as error:
            self.failures += 1
            self._failures_in_a_row += 1
            self._failed = True
            self.failure = f"{type(error).__name__}: {error}"
            log.debug("a draft session failed", exc_info=True)
            self._reset()
            return otherwise


def run_round(
    model: LanguageModel, calls: Sequence[tuple[ModelSession, Sequence[int], int]]
) -> list[Draft]:
    """One draft per call. Each step is one pass of the model over all that still want one."""
    active = [session for session, tokens, count in calls if session.begin(tokens, count)]
    while active:
        batch = [session.feed() for session in active]
        try:
            rows = model.extend(batch)
        except Exception as error:
            if not any(session.has_drawn for session in active):
                raise
            # What made it fail may hang on what was drawn: dropping that could bias the answer.
            for session in active:
                session._broken = error
            break
        active = [
            session
            for session, row, (_, fed, _) in zip(active, rows, batch, strict=True)
            if session.step(row[0], len(fed))
        ]
    return [session.finish() for session, _, _ in calls]


def left_out(vocabulary: Vocabulary, to_target: Sequence[int], settings: DraftSettings) -> Ids:
    """The draft ids that the settings keep from being drawn."""
    kinds = np.asarray(vocabulary.kinds)
    if settings.vocabulary is None:
        return np.empty(0, dtype=np.int64)
    speaking = np.flatnonzero(kinds <= _ADDED)
    if settings.vocabulary == "shared":
        result: Ids = speaking[np.asarray(to_target)[speaking] < 0]
        return result
    return speaking[int(settings.vocabulary) :]


class Chooser:
    """Draws draft ids by the target's parameters, applied in the draft's own vocabulary.

    Args:
        sampling: the parameters, already in draft ids.
        prompt_length: draft ids before the output.
        forbidden: draft ids that can never be proposed.
        settings: the draft's own temperature, and when it stops.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampling: SamplingParams,
        prompt_length: int,
        noise: Noise | None,
        forbidden: Sequence[int] = (),
        settings: DraftSettings = _AS_THE_TARGET,
    ) -> None:
        self._settings = settings
        if settings.temperature is not None and noise is not None:
            sampling = replace(sampling, temperature=settings.temperature)
        self.sampler = Sampler(sampling, model.vocabulary, prompt_length)
        self._noise = noise
        self._keys = None if sampling.temperature == 0 else token_keys(model.vocabulary)
        self._forbids = len(forbidden) > 0
        self._forbidden = torch.as_tensor(np.asarray(forbidden, dtype=np.int64))
        banned = self.sampler.argmax_mask()
        # What is None takes the law; else the choice is the arg-max without these ids.
        self._masked = (
            None if banned is None else torch.tensor([*forbidden, *banned], dtype=torch.int64)
        )

    def choose(self, logits: torch.Tensor, ids: Sequence[int], position: int) -> int:
        """The next draft id after `ids`, drawn with the target's noise at this byte position."""
        if self._masked is not None:
            logits[self._masked.to(logits.device)] = -torch.inf
            # NumPy's arg-max is many times faster than torch's on a CPU.
            row = logits.numpy() if logits.device.type == "cpu" else logits
            best = int(row.argmax())
            if math.isfinite(row[best]):
                return best
        law = self.law(logits, ids)
        if self._keys is None:
            return law.argmax()
        return draw(law, self._noise, position, self._keys)

    def law(self, logits: torch.Tensor, ids: Sequence[int]) -> Law:
        """The law of the next draft id after `ids`; what can never be proposed is left out."""
        self._mask(logits)
        return self.sampler.law(logits, ids)

    def unsure(self, logits: torch.Tensor) -> bool:
        """Whether the draft's scores (vocab,) are too flat to go on."""
        settings = self._settings
        if not settings.stops:
            return False
        self._mask(logits)
        row = logits.detach().to("cpu", torch.float32).numpy()
        row = row - row.max()
        weights = np.exp(row)
        total = float(weights.sum(dtype=np.float64))
        if 1 < settings.min_confidence * total:  # the best one's weight is 1
            return True
        if settings.max_entropy is None:
            return False
        possible = weights > 0
        mean = float((weights[possible] * row[possible]).sum(dtype=np.float64)) / total
        return math.log(total) - mean > settings.max_entropy

    def _mask(self, logits: torch.Tensor) -> None:
        if self._forbids:
            logits[self._forbidden.to(logits.device)] = -torch.inf
