"""The adaptive policy: which source drafts, and how much, by what pays.

Only past rounds and the text so far decide, so K is settled before anything of a round is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from anydraft.drafter import Outlook
from anydraft.learned import Experience, LocalRates, SourceExperience, shared_draft
from anydraft.policy import Outcome, Policy


class Sources(Protocol):
    """A draft session with one or several sources, of which one drafts in a round."""

    source: int

    def outlooks(self, tokens: Sequence[int]) -> list[Outlook]:
        """What each source can say of the next draft before it is made."""


_MODEL_MOST = 16  # candidates looked at where the source itself sets no limit
_LOOKUP_MOST = 32
_ALLOWANCE = 0.01  # share of plain decoding's time that trying a source may cost
_ADVANCE_TOKENS = 200  # a purse starts with one pass, or the allowance of so long an answer
_FLOOR = -5.0  # a purse is not led below it, whatever is expected of a draft
_MARGIN = 1.01  # expected speed-up that is worth a draft
_HOPE = 1.03  # possible speed-up that is worth a trial
_REVIVED = 0.75  # acceptance that a source which has not paid of late may have come to
_LOOK_AGAIN = 16  # rounds after which even a resting source is reckoned with again
_IN_USE = 8  # rounds for which a source counts as in use after it was the best
_REVISIT = 100  # drafted rounds after which the plain pass is measured again
_CATCH_UP = 16  # tokens behind from which reading them is a cost of its own
_CHEAP_GLANCE = 0.01
_BUCKETS = (0, 0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6)
LOOKUP_PRIORS = (0.46, 0.6, 0.73, 0.85, 0.9, 0.93, 0.95, 0.96)
"""Rates of lookup by match length (2, 3, 4, 5, 6-7, 8-11, 12-19, longer), 24 prompts, greedy."""
MODEL_PRIORS = (0.5,)


@dataclass(slots=True)
class _Option:
    """K tokens from one source: expected tokens and seconds of the round; hopeful and careful."""

    source: int
    count: int
    tokens: float
    seconds: float
    hopeful: float  # tokens per second at best
    stake: float  # passes over one token that are lost if nothing is accepted
    risk: float  # expected loss, should what is unknown turn out dear


class AdaptivePolicy(Policy):
    """The source and K with the highest expected speed, from what was measured and counted.

    It tries what might be better, but only as far as a small share of the time allows (each
    source's purse), and waits longer after each trial that failed. So it stays close to plain
    decoding where drafting does not pay.

    Args:
        experience: shared by the engine's sequences.
        session: the sequence's sources; this policy sets which of them drafts.
        already_read: tokens at the start of the text that the sources have read before.
    """

    def __init__(self, experience: Experience, session: Sources, already_read: int = 0) -> None:
        self._experience = experience
        self._session = session
        self._rates = [LocalRates(source.rates) for source in experience.sources]
        self._read = [already_read] * len(experience.sources)  # tokens that each has seen
        self._used = [-_IN_USE] * len(experience.sources)  # round in which it was last the best
        self._idle = [False] * len(experience.sources)
        self._hopeless = [False] * len(experience.sources)
        self._outlooks: list[Outlook] = []
        self._looked = self._looked_before = False
        self._trial = 0.0  # speed that a trial has to beat; 0: no trial
        self._asked = self._behind = self._length = 0
        self._start: int | None = None
        self._pending: Outcome | None = None
        self._tokens = self._seconds = 0.0  # of recent rounds
        self._look_wait, self._look_due, self._rounds = 1, 0, 0

    # ---- choosing

    def choose(self, tokens: Sequence[int], room: int, sharers: int) -> int:
        # The last round is digested here, where the loop's clock runs.
        self._digest()
        known = self._experience
        known.rounds += 1
        self._rounds += 1
        self._length = len(tokens)
        self._looked, self._trial = False, 0.0
        self._asked = 0
        if self._start is None:
            self._begin(len(tokens), room)
        # The first token comes soonest without a draft; and nothing is tried before v(1) is known.
        if self._rounds == 1 or known.passes.count(sharers) < 2 or known.since_plain > _REVISIT:
            return 0
        base = self._plain_seconds(sharers)
        self._outlooks = self._look(tokens, base)
        options = self._options(room, sharers, base)
        if not options:
            return 0
        chosen = self._best(options, base)
        if chosen is not None:
            self._used[chosen.source] = known.rounds
        trial = self._worth_trying(options, chosen, base)
        if trial is not None:
            chosen, self._trial = trial, _speed(chosen, base)
        if chosen is None:
            return 0
        self._session.source = chosen.source
        self._asked = chosen.count
        self._behind = 0
        if known.sources[chosen.source].blind:  # others have read the text when they looked ahead
            self._behind = len(tokens) - self._read[chosen.source]
        self._read[chosen.source] = len(tokens)
        return chosen.count

    def _begin(self, length: int, room: int) -> None:
        self._start = length
        known = self._experience
        if not known.started:
            known.started = True
            for source in known.sources:
                source.purse = max(1.0, _ALLOWANCE * min(room, _ADVANCE_TOKENS))

    def _plain_seconds(self, sharers: int) -> float:
        """A round of plain decoding."""
        known = self._experience
        return known.passes.mean(sharers) + known.overhead.get(0.0) * sharers

    def _look(self, tokens: Sequence[int], base: float) -> list[Outlook]:
        """What the sources foresee; looking costs time, so it is done less where it never helps."""
        known = self._experience
        cost = known.glance.get(0.0)
        cheap = cost < _CHEAP_GLANCE * base or known.look_gain.get(0.0) > cost
        if not cheap and self._rounds < self._look_due:
            return [Outlook(None if s.blind else 0) for s in known.sources]
        if not cheap:
            self._look_wait = min(2 * self._look_wait, 64)
            self._look_due = self._rounds + self._look_wait
        self._looked_before, self._looked = self._looked or self._looked_before, True
        return self._session.outlooks(tokens)

    def _remaining(self, room: int) -> float:
        """Tokens that the answer will probably still have."""
        said = self._length - (self._start or 0)
        usual = self._experience.answer_length.get(96.0)
        return max(1.0, min(room + 1, max(usual - said, said / 2, 8.0)))

    def _options(self, room: int, sharers: int, base: float) -> list[_Option]:
        remaining = self._remaining(room)
        found: list[_Option] = []
        for index, outlook in enumerate(self._outlooks):
            most = _MODEL_MOST if outlook.most is None else min(outlook.most, _LOOKUP_MOST)
            if most <= 0 or self._rests(index):
                continue
            options = self._options_of(index, outlook, min(most, room), sharers, base, remaining)
            self._idle[index] = all(_speed(o, base) * base < _MARGIN for o in options)
            self._hopeless[index] = all(o.hopeful * base <= _HOPE for o in options)
            found += options
        return found

    def _rests(self, index: int) -> bool:
        """Nothing was expected of a model when last looked at, and no trial is due or would help.

        Only a trial brings news of it, but catching up pays better in a longer answer.
        """
        source = self._experience.sources[index]
        due = self._experience.rounds >= source.due and not self._hopeless[index]
        again = self._rounds % _LOOK_AGAIN == 0
        return source.blind and self._idle[index] and not (due or again)

    def _options_of(
        self, index: int, outlook: Outlook, most: int, sharers: int, base: float, remaining: float
    ) -> list[_Option]:
        known = self._experience
        source, rates, passes = known.sources[index], self._rates[index], known.passes
        unit, plain = passes.mean(sharers), known.overhead.get(0.0)
        in_use = known.rounds - self._used[index] < _IN_USE
        line = source.costs.line(unit)
        extra = source.overhead.get(1.5 * plain) - plain
        # A sequence's share of the drafts, with as many others as usual, and with all of them.
        others = max(1.0, known.drafting.get(1.0) * sharers)
        share, least = shared_draft(others) / others, shared_draft(sharers) / sharers
        behind = self._length - self._read[index] if source.blind else 0
        catch_up = source.costs.read(unit) * behind if behind >= _CATCH_UP else 0.0
        found: list[_Option] = []
        survival = hope = tokens = hoped = 1.0
        before: float | None = None
        for count in range(1, most + 1):
            level = _level(outlook, count - 1)
            before, error = rates.estimate(level, before)
            survival *= before
            hope *= min(0.98, max(before + 0.7 * error, 0.0 if in_use else _REVIVED))
            tokens += survival
            hoped += hope
            width = sharers + count
            rest = line(count) * share + extra
            hoped_rest = line(count) * least + extra if source.costs.known else 0.0
            more = sharers * (passes.mean(width) - unit + rest)
            spread = sharers * catch_up * tokens / remaining
            cheapest = sharers * (passes.low(width) - unit + hoped_rest)
            dearest = sharers * (passes.high(width) - unit + rest + catch_up)
            found.append(
                _Option(
                    index,
                    count,
                    tokens,
                    base + more + spread,
                    hoped / (base + max(0.0, cheapest) + spread),
                    more / base,
                    dearest / base - (tokens - 1),
                )
            )
            if hope < 0.02:
                break
        return found

    def _best(self, options: list[_Option], base: float) -> _Option | None:
        """The option worth most at the speed that is reached anyway; None is plain decoding."""
        known = self._experience
        able = [o for o in options if known.sources[o.source].paused_until <= known.rounds]
        within = [o for o in able if known.sources[o.source].purse - o.stake > _FLOOR]
        top = max((_speed(o, base) for o in within), default=0.0)
        if top * base < _MARGIN:
            # Only its purse keeps a source from what seems good: it did worse than expected.
            for option in able:
                if option.tokens / option.seconds * base >= _MARGIN:
                    known.sources[option.source].pause(known.rounds)
            return None
        # A round is worth its tokens less its time at the usual speed: one that is better than
        # usual may be longer. This round's best choice bounds it, the text may have changed.
        usual = self._tokens / self._seconds if self._seconds > 0 else 0.0
        speed = min(max(usual, 1 / base), top)
        return max(within, key=lambda o: o.tokens - speed * o.seconds)

    def _worth_trying(
        self, options: list[_Option], chosen: _Option | None, base: float
    ) -> _Option | None:
        """What may be better than the choice, is due for a trial, and can be afforded."""
        known = self._experience
        speed = _speed(chosen, base)
        best: _Option | None = None
        for option in options:
            source = known.sources[option.source]
            affordable = option.risk <= source.purse and source.purse - option.stake > _FLOOR
            if known.rounds < source.due or not affordable:
                continue
            if option.hopeful <= _HOPE * speed or (best and best.hopeful >= option.hopeful):
                continue
            # A source that has not paid for long is tried with as little as might do.
            resting = known.rounds - self._used[option.source] >= _IN_USE
            if best is None or not (resting and best.source == option.source):
                best = option
        return None if best is chosen else best

    # ---- learning

    def observe(self, outcome: Outcome) -> None:
        self._pending = outcome
        if outcome.finished:
            self._digest()
            self._experience.answer_length.add(self._length + outcome.emitted - (self._start or 0))

    def _digest(self) -> None:
        outcome, self._pending = self._pending, None
        if outcome is None:
            return
        known = self._experience
        if outcome.prompt:  # a pass of another kind; with a draft its time would mislead, too
            return
        known.passes.observe(outcome.rows, outcome.target_seconds)
        share = outcome.overhead_seconds / outcome.sharers
        base = self._plain_seconds(outcome.sharers)
        seconds = base
        if outcome.asked and self._asked:
            source = known.sources[self._session.source]
            seconds += outcome.sharers * self._digest_draft(outcome, source, share)
            gain = outcome.emitted - seconds / base
            if self._trial:
                source.tried(known.rounds, outcome.emitted > self._trial * seconds)
            source.earn(gain / outcome.sharers)
            if self._looked:
                known.look_gain.add(gain * base)
        else:
            known.overhead.add(share)
            if self._looked and self._looked_before:
                known.glance.add(outcome.draft_seconds / outcome.sharers)
                known.look_gain.add(0.0)
        if outcome.drafted:
            known.since_plain += 1
        elif outcome.rows == outcome.sharers:
            known.since_plain = 0
        for source in known.sources:
            source.earn(_ALLOWANCE * outcome.emitted / outcome.sharers)
        self._tokens = 0.95 * self._tokens + outcome.emitted
        self._seconds = 0.95 * self._seconds + seconds

    def _digest_draft(self, outcome: Outcome, source: SourceExperience, share: float) -> float:
        """Learn from a draft; seconds that it added to the round."""
        known = self._experience
        unit = known.passes.mean(outcome.sharers)
        known.drafting.add(outcome.drafting / outcome.sharers)
        spent = outcome.draft_seconds / outcome.drafting
        # Of drafts made side by side the longest decides, and beside a model lookup takes no time.
        if outcome.drafting == 1 or (source.blind and self._asked == outcome.longest):
            alone = outcome.draft_seconds / shared_draft(outcome.drafting)
            if self._behind >= _CATCH_UP:
                source.costs.observe_reading(self._asked, self._behind, alone, unit)
            else:
                source.costs.observe(self._asked, alone)
        if outcome.drafting > 1:
            alone = source.costs.line(unit)(self._asked)
            spent = alone * shared_draft(outcome.drafting) / outcome.drafting
        source.overhead.add(share)
        index = self._session.source
        rates, outlook = self._rates[index], self._outlooks[index]
        accepted = outcome.emitted - 1
        for depth in range(accepted):
            rates.add(_level(outlook, depth), True)
        # A candidate that did not come counts as one that was not accepted. After the end of an
        # answer nobody knows.
        if accepted < outcome.asked and not outcome.finished:
            rates.add(_level(outlook, accepted), False)
        passes = known.passes
        width = outcome.sharers + outcome.drafted
        more = passes.mean(width) - passes.mean(outcome.sharers)
        return more + spent + share - known.overhead.get(share)


def _speed(option: _Option | None, base: float) -> float:
    """Expected tokens per second; None is plain decoding."""
    return 1 / base if option is None else option.tokens / option.seconds


def _level(outlook: Outlook, depth: int) -> int:
    """Which rate a candidate has: by depth, or by the length of the match that would be behind it.

    A match that has been right so far is a longer match.
    """
    if not outlook.match:
        return depth
    length = outlook.match + depth
    return _BUCKETS[length] if length < len(_BUCKETS) else len(LOOKUP_PRIORS) - 1
