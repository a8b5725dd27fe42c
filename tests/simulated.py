"""Rounds against a clock that charges what a test says: policies without models.

A text is a list of positions; each source of drafts is right or wrong about each of them, once and
for all, so every policy meets the same coins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anydraft.adaptive import AdaptivePolicy
from anydraft.drafter import Outlook
from anydraft.learned import DraftCosts, Experience, PassCosts
from anydraft.policy import FixedPolicy, Outcome, Policy
from anydraft.sources import new_source
from anydraft.speed import Curve


@dataclass
class Source:
    """A source of drafts.

    Attributes:
        right: per position of the text whether a candidate for it is right.
        start, step: seconds of a draft of K: start + step * K.
        read: seconds per token of text that it has not seen.
        match: per position the length of the match there (lookup), or None: a model.
    """

    right: Sequence[bool]
    start: float = 0.0
    step: float = 0.0
    read: float = 0.0
    match: Sequence[int] | None = None

    @property
    def blind(self) -> bool:
        return self.match is None


@dataclass
class Text:
    """What is generated: a prompt's length, and the sources' luck along the answer."""

    length: int
    sources: list[Source]
    prompt: int = 30


@dataclass
class World:
    """A machine: seconds of a target pass by width, and of all else in a round.

    Attributes:
        noise: standard deviation of the time of each pass, relative.
        hiccup: probability that a round takes three times as long.
    """

    verify: Callable[[int], float]
    overhead: float = 0.0
    draft_overhead: float = 0.0
    glance: float = 0.0
    noise: float = 0.0
    hiccup: float = 0.0


@dataclass
class Run:
    """What came of it."""

    seconds: float = 0.0
    tokens: int = 0
    widths: list[int] = field(default_factory=list)
    sources: list[int | None] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Session:
    """The sources as a policy sees them."""

    def __init__(self, text: Text) -> None:
        self.source = 0
        self.text = text

    def outlooks(self, tokens: Sequence[int]) -> list[Outlook]:
        at = len(tokens) - self.text.prompt
        found = []
        for source in self.text.sources:
            if source.match is None:
                found.append(Outlook())
                continue
            match = source.match[min(at, len(source.match) - 1)]
            most = 0 if match < 2 else match if match < 6 else 1000
            found.append(Outlook(most, match))
        return found


def fresh(text: Text, world: World, *, profiled: bool) -> Experience:
    """An engine's experience at its start, with or without a profile."""
    sources = []
    for source in text.sources:
        made = new_source(blind=source.blind)
        if profiled and source.blind:
            points = {k: source.start + source.step * k for k in (1, 2, 4, 8, 16)}
            made.costs = DraftCosts(Curve(points), source.read)
        sources.append(made)
    curve = Curve({n: world.verify(n) for n in range(1, 18)}) if profiled else None
    return Experience(PassCosts(curve), sources)


def play(text: Text, world: World, policy: Policy, session: Session, seed: int = 0) -> Run:
    """Generate the text under a policy."""
    luck = random.Random(seed)
    run = Run()
    tokens = [0] * text.prompt
    read = [0] * len(text.sources)
    end = text.prompt + text.length
    first = True
    while len(tokens) < end:
        room = end - len(tokens) - 1
        asked = max(0, min(policy.choose(tokens, room, 1), room)) if room > 0 else 0
        drafted = accepted = 0
        draft_seconds = world.glance
        if asked:
            source = text.sources[session.source]
            at = len(tokens) - text.prompt
            drafted = min(asked, _most(session, tokens))
            behind = len(tokens) - read[session.source]
            draft_seconds += source.start + source.step * drafted + source.read * behind
            read[session.source] = len(tokens)
            while accepted < drafted and source.right[at + accepted]:
                accepted += 1
        shake = max(0.3, 1 + world.noise * luck.gauss(0, 1))
        shake *= 3.0 if luck.random() < world.hiccup else 1.0
        target_seconds = world.verify(drafted + 1) * shake
        overhead = world.draft_overhead if drafted else world.overhead
        tokens += [0] * (accepted + 1)
        if not first:  # the prompt's pass is the same for all
            run.seconds += draft_seconds + target_seconds + overhead
            run.tokens += accepted + 1
            run.widths.append(drafted + 1)
            run.sources.append(session.source if drafted else None)
        policy.observe(
            Outcome(
                asked=asked,
                drafted=drafted,
                emitted=accepted + 1,
                rows=drafted + 1 + (text.prompt if first else 0),
                prompt=first,
                sharers=1,
                drafting=int(asked > 0),
                longest=asked,
                draft_seconds=draft_seconds,
                target_seconds=target_seconds,
                overhead_seconds=overhead,
                finished=len(tokens) >= end,
            )
        )
        first = False
    return run


def play_batch(texts: Sequence[Text], world: World, *, drafting: bool) -> float:
    """Tokens per second of texts decoded as one batch, each under a policy of its own.

    The drafts of a round are made side by side: the longest one decides how long that takes.
    """
    known = fresh(texts[0], world, profiled=True)
    sessions = [Session(text) for text in texts]
    policies: list[Policy] = [
        AdaptivePolicy(known, session) if drafting else FixedPolicy(0) for session in sessions
    ]
    tokens = [[0] * text.prompt for text in texts]
    seconds, said = 0.0, 0
    active = list(range(len(texts)))
    while active:
        asked, drafted, emitted, draft_seconds = {}, {}, {}, 0.0
        for i in active:
            room = texts[i].prompt + texts[i].length - len(tokens[i]) - 1
            choice = policies[i].choose(tokens[i], room, len(active)) if room > 0 else 0
            asked[i] = max(0, min(choice, room))
            source = texts[i].sources[sessions[i].source]
            drafted[i] = min(asked[i], _most(sessions[i], tokens[i])) if asked[i] else 0
            if asked[i]:
                draft_seconds = max(draft_seconds, source.start + source.step * drafted[i])
        rows = len(active) + sum(drafted.values())
        target_seconds = world.verify(rows)
        for i in active:
            at = len(tokens[i]) - texts[i].prompt
            right = texts[i].sources[sessions[i].source].right
            emitted[i] = 1
            while emitted[i] <= drafted[i] and right[at + emitted[i] - 1]:
                emitted[i] += 1
            tokens[i] += [0] * emitted[i]
        seconds += draft_seconds + target_seconds + world.overhead * len(active)
        said += sum(emitted.values())
        for i in active:
            policies[i].observe(
                Outcome(
                    asked=asked[i],
                    drafted=drafted[i],
                    emitted=emitted[i],
                    rows=rows,
                    prompt=False,
                    sharers=len(active),
                    drafting=sum(count > 0 for count in asked.values()),
                    longest=max(asked.values()),
                    draft_seconds=draft_seconds,
                    target_seconds=target_seconds,
                    overhead_seconds=world.overhead * len(active),
                    finished=len(tokens[i]) >= texts[i].prompt + texts[i].length,
                )
            )
        active = [i for i in active if len(tokens[i]) < texts[i].prompt + texts[i].length]
    return said / seconds


def _most(session: Session, tokens: Sequence[int]) -> int:
    most = session.outlooks(tokens)[session.source].most
    return 1000 if most is None else most


def adaptive(
    text: Text, world: World, experience: Experience | None = None, *, profiled: bool = True,
    seed: int = 0,
) -> Run:  # fmt: skip
    """The text under the adaptive policy."""
    session = Session(text)
    known = experience or fresh(text, world, profiled=profiled)
    return play(text, world, AdaptivePolicy(known, session), session, seed)


def fixed(text: Text, world: World, count: int, source: int = 0, seed: int = 0) -> Run:
    """The text under a fixed K from one source."""
    session = Session(text)
    session.source = source
    return play(text, world, FixedPolicy(count), session, seed)


def coins(length: int, rate: float | Callable[[int], float], seed: int) -> list[bool]:
    """Right or wrong per position."""
    source = random.Random(seed)
    return [
        source.random() < (rate if isinstance(rate, float) else rate(at)) for at in range(length)
    ]


def lookup_source(kinds: Sequence[str], seed: int, start: float = 0.0002) -> Source:
    """Lookup over a text of "prose" and "copy" positions."""
    luck = random.Random(seed)
    right: list[bool] = []
    match: list[int] = []
    run = 0
    for kind in kinds:
        if kind == "copy":
            right.append(luck.random() < 0.98)
            run = run + 1 if right[-1] else 0
            match.append(min(run, 40))
        else:
            run = 0
            match.append(luck.choice([0, 0, 0, 0, 2, 2, 3]))
            right.append(luck.random() < 0.2)
    return Source(right, start=start, match=match)


def speeds_of_fixed(text: Text, world: World, counts: Sequence[int], source: int = 0) -> Any:
    """K -> speed."""
    return {k: fixed(text, world, k, source).speed for k in counts}
