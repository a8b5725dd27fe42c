"""Several drafters as one: each round one of them drafts, and the others keep what they know."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anydraft.drafter import Draft, DraftCall, DraftContext, Drafter, DraftSession, Outlook

log = logging.getLogger(__name__)


class _Absent:
    """Stands for a drafter that cannot serve a request."""

    tokens_processed = 0

    def close(self) -> None:
        """Nothing to free."""


class SeveralSession:
    """One sequence's session with each drafter.

    Attributes:
        source: which of them drafts in the next round; the policy sets it.
        sessions: in the drafters' order.
        errors: why a drafter is no longer used for this sequence.
    """

    def __init__(
        self, owner: SeveralDrafters, sessions: list[DraftSession], errors: list[str | None]
    ) -> None:
        self.source = 0
        self.sessions = sessions
        self.errors = errors
        self._owner = owner

    @property
    def tokens_processed(self) -> int:
        """Draft-model tokens fed so far, by all of them."""
        return sum(session.tokens_processed for session in self.sessions)

    def outlooks(self, tokens: Sequence[int]) -> list[Outlook]:
        """What each drafter foresees; nothing from one that has failed."""
        return [self._owner.outlook(self, source, tokens) for source in range(len(self.sessions))]

    def close(self) -> None:
        """Close them all."""
        for session in self.sessions:
            session.close()


class SeveralDrafters:
    """A drafter made of others.

    Args:
        drafters: the first is the one that drafts unless a policy chooses.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.name = self.drafters[0].name

    def new_session(self, context: DraftContext) -> SeveralSession:
        """A session with each; lazy as theirs are."""
        sessions: list[DraftSession] = []
        errors: list[str | None] = []
        for index, drafter in enumerate(self.drafters):
            previous = context.previous
            if isinstance(previous, SeveralSession):
                previous = previous.sessions[index] if index < len(previous.sessions) else None
            elif index:
                previous = None
            unable = self._take_part(index, context) if index else None
            errors.append(unable)
            if unable is None:
                sessions.append(drafter.new_session(replace(context, previous=previous)))
            else:
                sessions.append(_Absent())
        return SeveralSession(self, sessions, errors)

    def _take_part(self, index: int, context: DraftContext) -> str | None:
        """None, or why not: the request is verified by laws that the drafter does not offer."""
        drafter, law = self.drafters[index], getattr(context, "law", None)
        offered: dict[str, str] = getattr(drafter, "laws", {})
        if law is None or offered.get(law) == "":
            return None
        return offered.get(law) or f"{drafter.name} has no law {law}"

    def outlook(self, session: SeveralSession, source: int, tokens: Sequence[int]) -> Outlook:
        """What one drafter foresees."""
        foresee: Any = getattr(self.drafters[source], "outlook", None)
        if session.errors[source] is not None:
            return Outlook(0)
        if foresee is None:
            return Outlook()
        try:
            outlook: Outlook = foresee(session.sessions[source], tokens)
        except Exception as error:
            self._give_up([session], source, error)
            return Outlook(0)
        return outlook

    def draft(self, batch: Sequence[DraftCall]) -> list[Draft]:
        """One draft per sequence, from the drafter that its session names."""
        drafts = [Draft() for _ in batch]
        for source in range(len(self.drafters)):
            indices: list[int] = []
            calls: list[tuple[SeveralSession, Sequence[int], int]] = []
            for index, (session, tokens, count) in enumerate(batch):
                assert isinstance(session, SeveralSession)
                if session.source == source:
                    indices.append(index)
                    calls.append((session, tokens, count))
            for index, draft in zip(indices, self._drafts(source, calls), strict=True):
                drafts[index] = draft
        return drafts

    def _drafts(
        self, source: int, calls: list[tuple[SeveralSession, Sequence[int], int]]
    ) -> list[Draft]:
        """One drafter's drafts; if it breaks, these sequences go on without it."""
        able = [call for call in calls if call[0].errors[source] is None]
        made: list[Draft] = []
        if able:
            try:
                made = self.drafters[source].draft([(s.sessions[source], t, k) for s, t, k in able])
            except Exception as error:
                self._give_up([session for session, _, _ in able], source, error)
        found = iter(made)
        return [
            next(found) if error is None else Draft(error=error)
            for error in (session.errors[source] for session, _, _ in calls)
        ]

    def _give_up(self, sessions: list[SeveralSession], source: int, error: Exception) -> None:
        name = self.drafters[source].name
        log.warning("the draft %s failed; it goes on without: %s", name, error, exc_info=True)
        for session in sessions:
            session.errors[source] = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close them all."""
        for drafter in self.drafters:
            drafter.close()
