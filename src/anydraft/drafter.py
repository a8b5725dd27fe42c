"""What a drafter must do: propose target ids that the target then checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from anydraft.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anydraft.noise import Noise
    from anydraft.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """What one proposal was drawn from, over target ids.

    Attributes:
        token_ids: (n,) int64 ascending: the ids that could be proposed.
        probs: (n,) their probabilities, float64 (Fractions in proofs). They may sum to less than 1;
            the rest is the probability that there is no proposal.
    """

    token_ids: npt.NDArray[np.int64]
    probs: Any

    def __getitem__(self, token_id: int) -> Any:
        """Probability of an id."""
        index = int(self.token_ids.searchsorted(token_id))
        if index == len(self.token_ids) or self.token_ids[index] != token_id:
            return 0
        return self.probs[index]

    def excess(self, weights: Any, factor: Any = 1) -> Any:
        """[factor * weights - law]+ over the whole vocabulary, as a new array."""
        result = weights.copy()  # the only array of the vocabulary's size: pages are dear
        result *= factor
        left = result[self.token_ids] - self.probs
        result[self.token_ids] = left * (left > 0)
        return result


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed target ids, possibly none, and the laws they were drawn from where known.

    Attributes:
        token_ids: the proposals in turn.
        laws: one per proposal, each given all that was proposed before; or None (only `match` can
            verify such a draft). One law more than ids: after them nothing usable was drawn from
            the last law, which counts as a rejection.
        error: why this drafter has given up for good; None if it has not.
    """

    token_ids: list[int] = field(default_factory=list)
    laws: list[DraftLaw] | None = None
    error: str | None = None

    @property
    def proposals(self) -> list[int | None]:
        """The ids, and None for a last law that proposed nothing."""
        nothing = self.laws is not None and len(self.laws) > len(self.token_ids)
        return [*self.token_ids, None] if nothing else list(self.token_ids)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a source of drafts can say of its next draft before it makes it."""

    most: int | None = None
    """Ids that it would propose at most; None: as many as it is asked for."""
    match: int = 0
    """Length of the match that it would copy from; 0 where there is no such thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """How a draft model drafts, beyond the target's sampling parameters.

    None of it can change what is said, or its law: stops are decided on the draft's probabilities
    before a token is drawn from them, and the rest only makes another draft.

    Args:
        temperature: the draft's own at sampled requests; None is the target's.
        min_confidence: no token is drawn where the draft's best has less probability than this
            (softmax of its scores at temperature 1); 0 never stops.
        max_entropy: no token is drawn where the draft's entropy is above this, in nats; None never
            stops.
        vocabulary: "shared": only tokens that are one of the target's too; a number: only so many
            of the draft's most frequent tokens (a tokenizer lists them by frequency), and controls.

    Raises:
        RequestError: a value outside its range.
    """

    temperature: float | None = None
    min_confidence: float = 0.0
    max_entropy: float | None = None
    vocabulary: str | int | None = None

    def __post_init__(self) -> None:
        limits = (("temperature", 100.0), ("min_confidence", 1.0), ("max_entropy", 100.0))
        for name, high in limits:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value <= high):
                raise RequestError(
                    f"the draft's {name} must be a number from 0 to {high:g}, not {value!r}"
                )
        size = self.vocabulary
        whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if size is not None and size != "shared" and not whole:
            raise RequestError(
                f"the draft's vocabulary must be 'shared' or a number of tokens, not {size!r}"
            )

    @property
    def stops(self) -> bool:
        """Whether the draft may stop before it has drafted as many tokens as it was asked for."""
        return self.min_confidence > 0 or self.max_entropy is not None


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know of one sequence before its first token."""

    prompt_ids: Sequence[int]
    """The target's prompt, in target ids."""
    sampling: SamplingParams
    """The target's parameters; a drafter may use them in its own vocabulary."""
    noise: Noise | None = None
    """The sequence's keyed noise; equal bytes share it across vocabularies. None if greedy."""
    messages: Sequence[dict[str, str]] | None = None
    """The chat behind the prompt, if it was a chat: dicts with "role" and "content"."""
    previous: DraftSession | None = None
    """The session of the conversation's last turn. The new one may take over what it has processed;
    `previous` is closed afterwards."""
    law: str | None = None
    """The proposal law whose probabilities each Draft must carry; None: none are wanted. What is
    drawn then uses the noise's "draft" tag, and no drawn token may be dropped."""


@runtime_checkable
class DraftSession(Protocol):
    """One sequence as its drafter sees it."""

    @property
    def tokens_processed(self) -> int:
        """Draft-model tokens fed so far, prompt included (0 for a drafter without a model)."""

    def close(self) -> None:
        """Free the memory; closing twice is fine."""


DraftCall: TypeAlias = tuple[DraftSession, Sequence[int], int]
"""(session, all target ids so far: prompt and output, most target ids that may come back)."""


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts, shared by many sequences."""

    name: str

    def new_session(self, context: DraftContext) -> DraftSession:
        """A session for one sequence. Lazy: nothing is processed until a draft is asked for.

        Raises:
            RequestError: `context.law` is one that this drafter does not offer. What it offers
                stands in its attribute `laws` (name -> "" or why not); without one, none.
        """

    def draft(self, batch: Sequence[DraftCall]) -> list[Draft]:
        """Propose a continuation for each sequence; fewer ids than asked for, or none, is fine.

        A session re-synchronises by common prefix, so it is never told what was accepted, and the
        caller may skip rounds or change the number asked for. Whatever fails inside one sequence is
        an empty Draft for it; an exception means that the drafter as a whole is broken.
        """

    def close(self) -> None:
        """Free weights and sessions."""
