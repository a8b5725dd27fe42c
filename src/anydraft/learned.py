"""What generating has taught about costs and acceptance; shared by all sequences of an engine.

Times are the loop's clock readings. Every estimate starts from a profile if there is one, else from
a careful guess, forgets slowly, and is not thrown by a single slow round.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from anydraft.speed import Curve

_OUTLIER = 2.0  # a round this much slower or faster than expected counts as no more than this
_SCALE_SHARE = 0.05  # how much of a surprise at one width is a change of the whole machine
_BIG = 0.25  # a surprise, as a logarithm, that does not come from noise twice in a row
_NEWEST = 0.15  # weight of a new measurement once a width is well known
_SEED_COUNT = 2  # measurements that a profile's value is worth
_ROW_GUESS = 0.5  # cost of an extra row, in passes over one, before any was seen
MAX_WAIT = 256
"""Most rounds between two trials of a source that does not pay."""
PURSE_CAP = 4.0
"""Passes over one token: so much of what a source has gained may be lost again."""


class PassCosts:
    """v(n) in seconds as it is here and now: a shape by width, times the machine's speed."""

    def __init__(self, curve: Curve | None = None) -> None:
        self._shape = {int(n): s for n, s in curve.points.items()} if curve else {}
        self._counts = dict.fromkeys(self._shape, _SEED_COUNT)
        self._surprise: dict[int, float] = {}
        self._scale = 1.0
        self._widths = sorted(self._shape)
        self._table: dict[int, tuple[float, float, float]] = {}

    @property
    def known(self) -> bool:
        """Whether the cost of a plain round can be relied on."""
        return self._counts.get(1, 0) >= _SEED_COUNT

    def count(self, width: int) -> int:
        """How often a width was measured."""
        return self._counts.get(width, 0)

    def observe(self, width: int, seconds: float) -> None:
        """Learn from one pass."""
        self._table.clear()
        count = self._counts.get(width, 0)
        self._counts[width] = count + 1
        if count == 0:
            self._shape[width] = seconds / self._scale
            self._widths = sorted(self._shape)
            return
        expected = self._scale * self._shape[width]
        if expected <= 0 or seconds <= 0:
            return
        surprise = math.log(min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER))
        share = max(1 / (count + 1), _NEWEST)
        if abs(surprise) > _BIG and surprise * self._surprise.get(width, 0.0) > 0:
            share = max(share, 0.5)  # twice in a row is no accident: what was known is stale
        self._surprise[width] = surprise if abs(surprise) > _BIG else 0.0
        self._scale *= math.exp(_SCALE_SHARE * surprise)
        self._shape[width] *= math.exp((share - _SCALE_SHARE) * surprise)

    def mean(self, width: int) -> float:
        """Expected seconds."""
        return self._of(width)[0]

    def low(self, width: int) -> float:
        """As cheap as it may yet turn out: an unseen row may be free."""
        return self._of(width)[1]

    def high(self, width: int) -> float:
        """As dear as it may yet turn out."""
        return self._of(width)[2]

    def _of(self, width: int) -> tuple[float, float, float]:
        found = self._table.get(width)
        if found is None:
            found = self._table[width] = self._estimate(width)
        return found

    def _estimate(self, width: int) -> tuple[float, float, float]:
        if width in self._shape:
            value = self._scale * self._shape[width]
            return value, value, value
        if not self._widths:
            return 0.0, 0.0, 0.0
        first, last = self._widths[0], self._widths[-1]
        one = self._shape[first]
        row = (self._shape[last] - one) / (last - first) if last > first else _ROW_GUESS * one
        row = max(row, 0.0)
        at = bisect_left(self._widths, width)
        if at == 0:
            return self._scale * one, self._scale * one, self._scale * one
        below = self._widths[at - 1]
        base = self._shape[below]
        if at < len(self._widths):
            above = self._widths[at]
            mean = base + (self._shape[above] - base) * (width - below) / (above - below)
        else:
            mean = base + row * (width - below)
        careful = max(2 * row, 0.25 * one) if last > first else one
        low, high = min(base, mean), max(mean, base + careful * (width - below))
        return self._scale * mean, self._scale * low, self._scale * high


class DraftCosts:
    """Seconds of a draft by K: a straight line, and what catching up costs per token.

    Args:
        curve: from a profile.
        read: from a profile: seconds per target token that the draft has to read.
    """

    _FORGET = 0.97

    def __init__(self, curve: Curve | None = None, read: float | None = None) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._read = read
        if curve is not None:
            for count in (1, 2, 4, 8):
                self._add(count, curve(count))

    @property
    def known(self) -> bool:
        return self._n > 0

    def _add(self, count: int, seconds: float) -> None:
        keep = self._FORGET
        self._n = self._n * keep + 1
        self._x = self._x * keep + count
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + count * count
        self._xy = self._xy * keep + count * seconds

    def observe(self, count: int, seconds: float) -> None:
        """Learn from one draft of K = count, with nothing to catch up on."""
        if self._n > 2:
            seconds = min(seconds, 3 * self.line(0.0)(count))
        self._add(count, seconds)

    def observe_reading(self, count: int, tokens: int, seconds: float, unit: float) -> None:
        """Learn from a draft that first had to read so many tokens."""
        drafting = self.line(unit)(count) if self.known else 0.0
        found = max(0.0, seconds - drafting) / tokens
        self._read = found if self._read is None else 0.7 * self._read + 0.3 * found

    def read(self, unit: float) -> float:
        """Seconds per token to catch up on; `unit` is a plain pass, for guessing."""
        return 0.015 * unit if self._read is None else self._read

    def line(self, unit: float) -> Line:
        """Seconds by K."""
        if not self.known:
            return Line(0.1 * unit, 0.25 * unit)
        mean_x, mean_y = self._x / self._n, self._y / self._n
        # One K alone tells no slope: then most of the cost is taken to grow with K.
        guess = mean_y / (mean_x + 0.5)
        spread = max(0.0, self._xx - self._n * mean_x * mean_x)
        slope = (self._xy - self._n * mean_x * mean_y + 0.5 * guess) / (spread + 0.5)
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return Line(mean_y - slope * mean_x, slope)


LOOKUP_COSTS = Curve({1: 0.0003, 8: 0.0003})
"""What lookup takes at most, whatever the machine; to start from."""


def shared_draft(drafting: float) -> float:
    """Seconds of drafts made side by side, in those of one alone: one pass serves them all."""
    return 1 + _SIDE_BY_SIDE * (drafting - 1)


_SIDE_BY_SIDE = 0.2


@dataclass(frozen=True, slots=True)
class Line:
    """start + slope * K."""

    start: float
    slope: float

    def __call__(self, count: int) -> float:
        return self.start + self.slope * count


class Rates:
    """Success rates by level, with a memory.

    Args:
        priors: rate of each level before anything was seen; the last holds for all beyond, unless
            `chain`.
        chain: a level that was not seen is expected to be like the one before it.
        memory: about how many trials a level remembers.
    """

    def __init__(self, priors: Sequence[float], memory: float, *, chain: bool) -> None:
        self._priors, self._chain = priors, chain
        self._keep = 1 - 1 / memory
        self.hits: dict[int, float] = {}
        self.tries: dict[int, float] = {}

    def add(self, level: int, hit: bool) -> None:
        """One trial."""
        self.hits[level] = self.hits.get(level, 0.0) * self._keep + hit
        self.tries[level] = self.tries.get(level, 0.0) * self._keep + 1

    def mean(self, level: int, before: float | None) -> float:
        """Expected rate; `before`: that of the level before, for a chain."""
        prior = self._priors[min(level, len(self._priors) - 1)]
        if self._chain and before is not None:
            prior = before
        weight = _PRIOR_WEIGHT
        return (self.hits.get(level, 0.0) + weight * prior) / (self.tries.get(level, 0.0) + weight)


_PRIOR_WEIGHT = 2.0
_SHARED_WEIGHT = 12.0  # trials that the experience of other sequences is worth in a new one


class LocalRates:
    """One sequence's rates: what all sequences have shown, bent by what this one shows."""

    def __init__(self, shared: Rates, memory: float = 32.0) -> None:
        self._shared = shared
        self._own = Rates((0.0,), memory, chain=False)

    def add(self, level: int, hit: bool) -> None:
        """One trial, for this sequence and for all."""
        self._own.add(level, hit)
        self._shared.add(level, hit)

    def estimate(self, level: int, before: float | None) -> tuple[float, float]:
        """(expected rate, its standard error)."""
        expected = self._shared.mean(level, before)
        weight = min(_SHARED_WEIGHT, self._shared.tries.get(level, 0.0) + _PRIOR_WEIGHT)
        tries = self._own.tries.get(level, 0.0) + weight
        mean = (self._own.hits.get(level, 0.0) + weight * expected) / tries
        return mean, math.sqrt(max(mean * (1 - mean), 0.01) / (tries + 1))


@dataclass(slots=True)
class Average:
    """A running mean that forgets; None before the first value."""

    newest: float = 0.1
    value: float | None = None

    def add(self, value: float) -> None:
        if self.value is None:
            self.value = value
            return
        value = min(value, 3 * self.value) if self.value > 0 else value
        self.value += self.newest * (value - self.value)

    def get(self, otherwise: float) -> float:
        return otherwise if self.value is None else self.value


@dataclass(slots=True)
class SourceExperience:
    """What is known of one source of drafts.

    Attributes:
        purse: passes over one token that trying this source may still lose; what it gains goes in.
        wait, due: rounds between two trials while it does not pay, and the round of the next one.
        paused_until: the round until which it is not used, because it did worse than expected.
        blind: it foresees nothing, so it needs no look before it drafts.
    """

    costs: DraftCosts
    rates: Rates
    overhead: Average = field(default_factory=Average)
    purse: float = 0.0
    wait: int = 1
    due: int = 0
    paused_until: int = 0
    next_pause: int = 16
    blind: bool = True

    def earn(self, passes: float) -> None:
        """Add a gain, or a loss, to the purse."""
        self.purse = min(self.purse + passes, PURSE_CAP)
        if self.purse == PURSE_CAP:
            self.next_pause = 16

    def tried(self, now: int, success: bool) -> None:
        """Try again at once after a success, after a failure each time later."""
        if success:
            self.wait = max(1, self.wait // 2)
            self.due = now + 1
        else:
            self.due = now + self.wait
            self.wait = min(2 * self.wait, MAX_WAIT)

    def pause(self, now: int) -> None:
        """Leave it alone for a while, each time for longer, and give it a new start after it."""
        if now >= self.paused_until:
            self.paused_until = now + self.next_pause
            self.next_pause = min(2 * self.next_pause, 512)
            self.purse = max(self.purse, -0.5 * PURSE_CAP)


@dataclass(slots=True)
class Experience:
    """All that an engine has learned, by source of drafts."""

    passes: PassCosts
    sources: list[SourceExperience]
    overhead: Average = field(default_factory=Average)
    glance: Average = field(default_factory=Average)
    """Seconds of choosing and of asking the drafters what they foresee, in rounds without draft."""
    drafting: Average = field(default_factory=lambda: Average(0.2, 1.0))
    """Share of a batch's sequences that draft in a round in which one does."""
    answer_length: Average = field(default_factory=lambda: Average(0.2, 96.0))
    look_gain: Average = field(default_factory=lambda: Average(0.05))
    """Seconds that looking won per look."""
    rounds: int = 0
    since_plain: int = 0
    started: bool = False
