"""What a drafter must do: propose target ids that the target then checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from anydraft.noise import Noise
    from anydraft.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed target ids, possibly none, and the laws they were drawn from where known."""

    token_ids: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None
    """(len(token_ids), target vocab size), or None."""
    error: str | None = None
    """Why this drafter has given up for good; None if it has not."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a source of drafts can say of its next draft before it makes it."""

    most: int | None = None
    """Ids that it would propose at most; None: as many as it is asked for."""
    match: int = 0
    """Length of the match that it would copy from; 0 where there is no such thing."""


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
        """A session for one sequence. Lazy: nothing is processed until a draft is asked for."""

    def draft(self, batch: Sequence[DraftCall]) -> list[Draft]:
        """Propose a continuation for each sequence; fewer ids than asked for, or none, is fine.

        A session re-synchronises by common prefix, so it is never told what was accepted, and the
        caller may skip rounds or change the number asked for. Whatever fails inside one sequence is
        an empty Draft for it; an exception means that the drafter as a whole is broken.
        """

    def close(self) -> None:
        """Free weights and sessions."""
