"""Runs of several contenders in turn, prompt by prompt, and ratios of their speeds.

A machine that is busy for a while slows all of them, so a figure is the median over prompts of the
ratio of two contenders on the same prompt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common


@dataclass(frozen=True)
class Run:
    """One timed generation.

    Attributes:
        ids: the new tokens; -1 each where a runtime does not tell them.
        seconds: of the whole call.
        first_tokens, first_seconds: of its first round, which processes the prompt.
    """

    ids: list[int]
    seconds: float
    first_tokens: int
    first_seconds: float

    @property
    def speed(self) -> float:
        """Tokens/s after the first round."""
        return (len(self.ids) - self.first_tokens) / (self.seconds - self.first_seconds)

    @property
    def whole_speed(self) -> float:
        """Tokens/s of the whole call."""
        return len(self.ids) / self.seconds


Contender = Callable[[list[int], int, int], Run]
"""(prompt ids, new tokens, number of draft tokens) -> Run."""


def own_run(engine: Any, ids: list[int], count: int, num_draft_tokens: int) -> Run:
    """anydraft's run: greedy, and no end token stops it."""
    started = time.perf_counter()
    answer = engine.generate(
        ids, max_tokens=count, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )
    seconds = time.perf_counter() - started
    stats = answer.stats
    if stats.draft_error:
        raise SystemExit(f"the draft failed: {stats.draft_error}")
    return Run(answer.token_ids, seconds, stats.first_round_tokens, stats.first_token_seconds)


def timed(run: Contender, ids: list[int], count: int, num_draft_tokens: int) -> Run:
    """One run, which must have given all its tokens."""
    result = run(list(ids), count, num_draft_tokens)
    if len(result.ids) != count:
        raise SystemExit(f"{run.__qualname__} gave {len(result.ids)} tokens, not {count}")
    return result


def best_of(
    run: Contender, candidates: Sequence[int], prompts: Sequence[list[int]], count: int
) -> tuple[int, dict[int, float]]:
    """The fastest number of draft tokens, and the tokens/s of all, over the calibration prompts.

    A single candidate is taken as it is.
    """
    speeds: dict[int, float] = {}
    if len(candidates) == 1:
        return candidates[0], speeds
    for num_draft_tokens in candidates:
        rates = [timed(run, ids, count, num_draft_tokens).speed for ids in prompts]
        speeds[num_draft_tokens] = len(rates) / sum(1 / rate for rate in rates)
    return max(speeds, key=lambda k: speeds[k]), speeds


@dataclass(frozen=True)
class Block:
    """Every prompt through every contender: `runs[contender][prompt]`."""

    runs: dict[str, list[Run]]

    @property
    def num_prompts(self) -> int:
        return len(next(iter(self.runs.values())))

    def ratio(self, one: str, other: str) -> float:
        """The median of the paired ratios of tokens/s after the first round."""
        pairs = zip(self.runs[one], self.runs[other], strict=True)
        return common.median(a.speed / b.speed for a, b in pairs)

    def whole_ratio(self, one: str, other: str) -> float | None:
        """The same for whole calls; None where the two did not generate as much."""
        pairs = list(zip(self.runs[one], self.runs[other], strict=True))
        if any(len(a.ids) != len(b.ids) for a, b in pairs):
            return None
        return common.median(a.whole_speed / b.whole_speed for a, b in pairs)

    def speeds(self) -> dict[str, float]:
        return {name: common.median(run.speed for run in runs) for name, runs in self.runs.items()}

    def identity(self, reference: str) -> dict[str, dict[str, int]]:
        """Per contender how many prompts and leading tokens agree with the reference."""
        result: dict[str, dict[str, int]] = {}
        for name, runs in self.runs.items():
            same = leading = total = 0
            for run, other in zip(runs, self.runs[reference], strict=True):
                pairs = list(zip(run.ids, other.ids, strict=False))
                first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                same += first == len(pairs)
                leading += first
                total += len(pairs)
            result[name] = {
                "prompts_identical": same,
                "prompts": len(runs),
                "leading_tokens_identical": leading,
                "tokens": total,
            }
        return result


def run_block(
    contenders: dict[str, tuple[Contender, int, int]],
    prompts: Sequence[list[int]],
    deadline: float | None = None,
) -> Block:
    """Every prompt through every contender (run, draft tokens, new tokens), starting in turn.

    Beyond the first, a prompt is begun only if it can be expected to end before the deadline.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    names = list(contenders)
    longest = 0.0
    for index, ids in enumerate(prompts):
        started = time.perf_counter()
        if index and deadline is not None and started + longest > deadline:
            break
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            run, num_draft_tokens, count = contenders[name]
            runs[name].append(timed(run, ids, count, num_draft_tokens))
        longest = max(longest, time.perf_counter() - started)
        line = ", ".join(f"{name} {runs[name][-1].speed:.1f}" for name in names)
        print(f"prompt {index + 1}/{len(prompts)}: {line}", file=sys.stderr)
    return Block(runs)
