"""SpeedModel: acceptance and measured costs -> expected speed for every K. Arithmetic only.

With S_k = P(the first k candidates are accepted), v(n) = seconds of a target pass over n new
tokens, d(K) = seconds of a draft of K and o = overhead of a round,

    N(K) = 1 + S_1 + ... + S_K                       tokens per round
    C(K) = d(K) + E[v(candidates + 1)] + o(K)        seconds per round
    speed-up(K) = N(K) C(0) / C(K)

which generalises Leviathan et al. (arXiv 2211.17192, section 3.3) from constant acceptance and
v(n) = v(1). Everything is counted in target tokens; what a draft's tokenizer makes of K target
tokens is in d(K).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_K = 16
"""Largest K that predictions look at."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a whole number (width of a pass, K), straight between and beyond what is known.

    Args:
        points: number -> seconds; at least one.
    """

    points: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point")

    def __call__(self, number: float) -> float:
        known = self.points.get(number)  # type: ignore[call-overload]
        if known is not None:
            return float(known)
        xs = sorted(self.points)
        if len(xs) == 1:
            return self.points[xs[0]]
        # Beyond the ends with the slope of the whole curve: a jagged end must not decide.
        if not xs[0] < number < xs[-1]:
            slope = (self.points[xs[-1]] - self.points[xs[0]]) / (xs[-1] - xs[0])
            end = xs[0] if number < xs[0] else xs[-1]
            return max(0.0, self.points[end] + slope * (number - end))
        right = bisect_left(xs, number)
        a, b = xs[right - 1], xs[right]
        share = (number - a) / (b - a)
        return self.points[a] * (1 - share) + self.points[b] * share

    def unevenness(self) -> float:
        """How far points lie off the straight line between their neighbours, relative, typically.

        So much a value between two points may be wrong; 0 where there is no inner point to tell.
        """
        xs = sorted(self.points)
        off = [
            abs(Curve({a: self.points[a], c: self.points[c]})(b) / self.points[b] - 1)
            for a, b, c in zip(xs, xs[1:], xs[2:], strict=False)
            if self.points[b] > 0
        ]
        return statistics.median(off) if off else 0.0

    def scaled(self, factor: float) -> Curve:
        """The same curve, `factor` times as high."""
        return Curve({x: y * factor for x, y in self.points.items()})


FREE = Curve({0: 0.0})
"""A draft that costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    """What a pair is expected to do.

    Args:
        acceptance: acceptance[k] = P(candidate k is offered and accepted | those before it were);
            the last value stands for all deeper candidates. Empty: nothing is ever accepted.
        verify: seconds of a target pass over n new tokens; its value at 1 is plain decoding's.
        draft: seconds of a draft of K target tokens, bringing the draft up to date and writing the
            candidates in target ids included.
        offered: offered[k] = P(at least k + 1 candidates come back when as many are asked for).
            Empty: always. Beyond its end its last value.
        overhead: seconds of everything else in a round of plain decoding.
        draft_overhead: the same in a round with a draft; None: as plain.
        startup: seconds paid once for the draft, its reading of the prompt above all.
        expected_tokens: tokens that the answer will still have, over which `startup` is spread.
    """

    acceptance: Sequence[float]
    verify: Curve
    draft: Curve = FREE
    offered: Sequence[float] = ()
    overhead: float = 0.0
    draft_overhead: float | None = None
    startup: float = 0.0
    expected_tokens: float = math.inf

    def survival(self, count: int) -> list[float]:
        """S_1 .. S_count."""
        product, found = 1.0, []
        for k in range(count):
            product *= _at(self.acceptance, k, 0.0)
            found.append(product)
        return found

    def tokens_per_round(self, count: int) -> float:
        """N(K): accepted tokens and the one that the target adds."""
        return 1.0 + sum(self.survival(count))

    def verify_seconds(self, count: int) -> float:
        """E[v(candidates + 1)] when K are asked for."""
        total, at_least = 0.0, 1.0
        for k in range(count):  # exactly k candidates
            more = min(at_least, _at(self.offered, k, 1.0))
            total += (at_least - more) * self.verify(k + 1)
            at_least = more
        return total + at_least * self.verify(count + 1)

    def round_seconds(self, count: int) -> float:
        """C(K), without the start-up."""
        if count == 0:
            return self.verify(1) + self.overhead
        extra = self.overhead if self.draft_overhead is None else self.draft_overhead
        return self.draft(count) + self.verify_seconds(count) + extra

    def seconds_per_token(self, count: int) -> float:
        """Expected time of one token at K = count, its share of the start-up included."""
        seconds = self.round_seconds(count) / self.tokens_per_round(count)
        if count and self.startup:
            seconds += self.startup / max(1.0, self.expected_tokens)
        return seconds

    def tokens_per_second(self, count: int) -> float:
        """Expected speed at K = count; 0 is plain decoding."""
        return 1.0 / self.seconds_per_token(count)

    def speedup(self, count: int) -> float:
        """Expected speed at K = count relative to plain decoding."""
        return self.seconds_per_token(0) / self.seconds_per_token(count)

    def best(self, most: int = MAX_K) -> int:
        """The K, 0 included, with the highest expected speed."""
        return max(range(most + 1), key=self.tokens_per_second)

    def with_free_draft(self) -> SpeedModel:
        """The same pair if its draft took no time: the ceiling for any quicker draft."""
        return replace(self, draft=FREE, startup=0.0)

    def with_acceptance(self, acceptance: float) -> SpeedModel:
        """The same costs if every candidate were offered and accepted with this probability.

        1.0 is the ceiling for any better draft of the same speed.
        """
        return replace(self, acceptance=(acceptance,), offered=())

    def break_even(self, most: int = MAX_K) -> float | None:
        """Smallest constant acceptance at which some K is as fast as plain; None: not even 1."""

        def gains(acceptance: float) -> bool:
            model = self.with_acceptance(acceptance)
            return any(model.speedup(count) >= 1 for count in range(1, most + 1))

        if not gains(1.0):
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if gains(middle) else (middle, high)
        return high

    def row_cost(self, most: int = MAX_K) -> float:
        """Cheapest extra row of a pass, in passes over one token: about 0 is free, 1 is serial."""
        one = self.verify(1)
        return min((self.verify(k + 1) / one - 1) / k for k in range(1, most + 1))

    def table(self, most: int = 8) -> list[dict[str, Any]]:
        """One row per K from 0 on: what is expected, and where the time goes (seconds)."""
        rows = []
        for count in range(most + 1):
            rows.append(
                {
                    "num_draft_tokens": count,
                    "tokens_per_round": self.tokens_per_round(count),
                    "draft_seconds": self.draft(count) if count else 0.0,
                    "verify_seconds": self.verify_seconds(count),
                    "round_seconds": self.round_seconds(count),
                    "tokens_per_second": self.tokens_per_second(count),
                    "speedup": self.speedup(count),
                    "speedup_free_draft": self.with_free_draft().speedup(count),
                    "speedup_all_accepted": self.with_acceptance(1.0).speedup(count),
                }
            )
        return rows


def _at(values: Sequence[float], index: int, otherwise: float) -> float:
    """values[index], its last value beyond the end, `otherwise` if it is empty."""
    if not values:
        return otherwise
    return values[min(index, len(values) - 1)]
