"""Runs to cells: paired ratios, medians, geometric means and bootstrap intervals.

A cell is one contender of one pair under one sampling setting. Speed is tokens after the first
round over the time after it. A ratio divides a run's speed by plain decoding's in the same block;
a prompt's ratio is the median over its repeats; a cell's figures are over prompts, which are also
what the bootstrap draws anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

MIN_TOKENS = 8
"""A run that has fewer tokens after its first round says too little about speed."""
RESAMPLES = 2000
Key = tuple[str, str, str, Any, str]


def speed(run: Mapping[str, Any]) -> float | None:
    """Tokens per second after the first round; None where there are too few of them."""
    tokens = run["tokens"] - run["first_tokens"]
    seconds = run["seconds"] - run["first_seconds"]
    return tokens / seconds if tokens >= MIN_TOKENS and seconds > 0 else None


def cell_key(run: Mapping[str, Any]) -> Key:
    """What makes two runs belong to the same cell."""
    return (
        run["pair"],
        run["sampling"],
        run["contender"],
        run["num_draft_tokens"],
        run["method"],
    )


def block_key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two runs comparable: same pair, prompt, turn, sampling and repeat."""
    return (run["pair"], run["sampling"], run["prompt"], run["turn"], run["repeat"])


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cells of these runs, in the order in which they first occur."""
    plain: dict[tuple[Any, ...], list[float]] = {}
    cells: dict[Key, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run.get("skipped"):
            continue
        cells.setdefault(cell_key(run), []).append(run)
        if run["contender"] == "plain" and (found := speed(run)) is not None:
            plain.setdefault(block_key(run), []).append(found)
    reference = {block: statistics.mean(speeds) for block, speeds in plain.items()}
    return [_cell(key, found, reference) for key, found in cells.items()]


def _cell(
    key: Key, runs: Sequence[Mapping[str, Any]], plain: Mapping[tuple[Any, ...], float]
) -> dict[str, Any]:
    pair, sampling, contender, length, method = key
    ratios: dict[tuple[str, int], list[float]] = {}
    kinds: dict[tuple[str, int], str] = {}
    short = set()
    for run in runs:
        prompt = (run["prompt"], run["turn"])
        own, base = speed(run), plain.get(block_key(run))
        if own is None or base is None:
            short.add(prompt)
            continue
        ratios.setdefault(prompt, []).append(own / base)
        kinds[prompt] = run["kind"]
    by_prompt = {prompt: statistics.median(found) for prompt, found in ratios.items()}
    by_kind: dict[str, list[float]] = {}
    for prompt, ratio in by_prompt.items():
        by_kind.setdefault(kinds[prompt], []).append(ratio)
    return {
        "pair": pair,
        "sampling": sampling,
        "contender": contender,
        "method": method,
        "num_draft_tokens": length,
        "prompts": len(by_prompt),
        "short_prompts": len(short - by_prompt.keys()),
        "runs": len(runs),
        "speedup": spread(list(by_prompt.values())),
        "speedup_by_kind": {kind: geometric_mean(found) for kind, found in by_kind.items()},
        "tokens_per_second": _median(speed(run) for run in runs),
        "first_token_seconds": _median(run["first_seconds"] for run in runs),
        "joules_per_token": _median(
            run["joules"] / run["tokens"] for run in runs if run.get("joules") and run["tokens"]
        ),
        **_drafting(runs),
        "identity": _count(run["identity"] for run in runs if run.get("identity")),
        "draft_errors": sum(1 for run in runs if run.get("draft_error")),
    }


def _drafting(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Acceptance, rounds and the time of an average round after the first."""
    known = [run for run in runs if "rounds" in run]
    drafted = _add_up(run["drafted_at"] for run in known)
    accepted = _add_up(run["accepted_at"] for run in known)
    acceptance = [a / d for a, d in zip(accepted, drafted, strict=True) if d]
    rounds = sum(run["rounds"] for run in known)
    later = sum(run["rounds"] - 1 for run in known)
    parts = {
        part: sum(run[f"later_{part}_seconds"] for run in known) / later if later else None
        for part in ("draft", "target", "overhead")
    }
    return {
        "acceptance": acceptance,
        "survival": np.cumprod(acceptance).tolist(),
        "tokens_per_round": sum(run["tokens"] for run in known) / rounds if rounds else None,
        "round_seconds": parts,
        "passes": _passes(known),
    }


def _passes(runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many target passes after the first had how many new tokens."""
    counts: dict[int, int] = {}
    for run in runs:
        for width, (count, _) in run.get("passes", {}).items():
            counts[int(width)] = counts.get(int(width), 0) + count
    return {str(width): count for width, count in sorted(counts.items())}


def _add_up(lists: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _count(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def spread(ratios: Sequence[float]) -> dict[str, float] | None:
    """Median, geometric mean and its 95 % bootstrap interval; None of nothing.

    The interval draws prompts anew, with the same random numbers each time; of one prompt it is a
    point.
    """
    if not ratios:
        return None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    source = np.random.default_rng(0)
    drawn = source.integers(0, len(logs), size=(RESAMPLES, len(logs)))
    means = np.exp(logs[drawn].mean(axis=1))
    low, high = np.quantile(means, [0.025, 0.975])
    return {
        "median": statistics.median(ratios),
        "geometric_mean": geometric_mean(ratios),
        "low": float(low),
        "high": float(high),
    }


def verify_cost(runs: Sequence[Mapping[str, Any]], pair: str) -> dict[int, float]:
    """Seconds of a target pass by its number of new tokens, as the pair's runs saw them.

    The median over runs of each run's median, weighted by how many passes it had.
    """
    seen: dict[int, list[tuple[float, int]]] = {}
    for run in runs:
        if run["pair"] == pair:
            for width, (count, seconds) in run.get("passes", {}).items():
                seen.setdefault(int(width), []).append((seconds, count))
    return {width: _weighted_median(found) for width, found in sorted(seen.items())}


def _weighted_median(found: list[tuple[float, int]]) -> float:
    found = sorted(found)
    half = sum(count for _, count in found) / 2
    for seconds, count in found:
        half -= count
        if half <= 0:
            return seconds
    return found[-1][0]
