"""Drafts from another runtime: PyTorch targets with GGUF drafts in llama.cpp, and the reverse.

Greedy, against our own plain decoding of the same target. Every prompt goes through plain decoding
and every K in turn, so that a machine that is busy for a while slows all of them; a figure is the
median over prompts of the ratio of tokens/s after the prompt's pass, at the best K of the pair.
Every drafted answer is compared with the plain one.

    python benchmarks/cross_runtime.py [--quick] [--json] [--pair PART ...]

Where a pair misses its goal, the ceiling of the cost model is shown: the speed-up that follows from
the measured v(n), the draft's measured cost and the measured acceptance, at the best K; and what
it would be with a draft that costs nothing, and with one that is always right.

The fp32 weights of both models are dequantised from 4-bit files, so a copy of SmolLM2 in 4 bits
agrees with it more often than a copy of a model that was never quantised would. The padded SmolLM2
says what SmolLM2 says and does FACTOR times the work: a stand-in for a big target.

The JSON object has, per pair, the best ratio; `details` has the ratio of every K, tokens per round,
acceptance by position, the types of the draft's weights, v(n), draft costs, goal and ceiling.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).parent / "study"))

FACTOR = 11  # times 30 layers: about the work of 1.2 G parameters
COUNTS = (1, 2, 3, 4, 6)
_GGUF = {"runtime": "llama_cpp"}


def _load(target: str, options: dict[str, Any], draft: str, draft_options: dict[str, Any]) -> Any:
    import anydraft

    return anydraft.load(target, draft=draft, draft_options=draft_options, **options)


def _padded() -> Any:
    """The padded model with a copy of the one that it was made from."""
    from padded import padded

    import anydraft
    from anydraft import store
    from anydraft.backends.self_draft import load_self_draft

    target = anydraft.load(str(padded(common.DRAFT, FACTOR))).target
    copy = load_self_draft(target, "self:q4_0", source=store.resolve(common.DRAFT))
    return anydraft.load(target, draft=copy)


@dataclass(frozen=True)
class Pair:
    """A target with a draft in another runtime.

    Attributes:
        load: opens it.
        goal: the speed-up over plain decoding that is hoped for; None: only reported.
        counts: the Ks.
        share: of the prompts; a slow target gets fewer.
    """

    load: Callable[[], Any]
    goal: float | None = None
    counts: Sequence[int] = COUNTS
    share: float = 1.0


PAIRS = {
    "gemma fp32 in torch, smollm2 Q4_1 in llama.cpp": Pair(
        lambda: _load(common.TARGET, {}, common.DRAFT, _GGUF), goal=1.45
    ),
    "smollm2 fp32 in torch, its q4_0 copy in llama.cpp": Pair(
        lambda: _load(common.DRAFT, {}, "self:q4_0", {}), goal=1.6
    ),
    f"smollm2 padded x{FACTOR} in torch, smollm2's q4_0 copy in llama.cpp": Pair(
        _padded, goal=2.5, counts=(2, 4, 6, 8), share=0.34
    ),
    "gemma Q4_K_M in llama.cpp, smollm2 Q4_1 in llama.cpp": Pair(
        lambda: _load(common.TARGET, _GGUF, common.DRAFT, _GGUF)
    ),
    "gemma Q4_K_M in llama.cpp, smollm2 int4 in torch": Pair(
        lambda: _load(common.TARGET, _GGUF, common.DRAFT, {})
    ),
}
QUICK_PAIRS = 1


@dataclass
class Runs:
    """What was measured of one pair, prompt by prompt."""

    ratios: dict[int, list[float]]
    per_round: dict[int, list[float]]
    plain_ms: list[float] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    differing: int = 0

    def count_acceptance(self, stats: Any) -> None:
        for mine, new in ((self.drafted_at, stats.drafted_at),
                          (self.accepted_at, stats.accepted_at)):  # fmt: skip
            mine += [0] * (len(new) - len(mine))
            for at, number in enumerate(new):
                mine[at] += number

    def acceptance(self) -> list[float]:
        """acceptance[k] over all drafted runs."""
        offered = list(zip(self.drafted_at, self.accepted_at, strict=True))
        return [accepted / drafted for drafted, accepted in offered if drafted >= 8]


def generate(engine: Any, prompt: str, count: int, num_draft_tokens: int) -> Any:
    """Always `count` tokens: no end token stops it."""
    return engine.generate(
        prompt, max_tokens=count, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )


def run(engine: Any, counts: Sequence[int], num_prompts: int, tokens: int, until: float) -> Runs:
    """Plain decoding and every K on prompt after prompt; takes no further one after `until`."""
    runs = Runs({k: [] for k in counts}, {k: [] for k in counts})
    for k in (0, *counts):
        generate(engine, "A first call, a first call", 6, k)
    for prompt in common.spread(common.prompts("general"), num_prompts):
        if runs.plain_ms and time.perf_counter() > until:
            break
        plain = generate(engine, prompt.text, tokens, 0)
        runs.plain_ms.append(1e3 / plain.stats.tokens_per_second)
        for k in counts:
            got = generate(engine, prompt.text, tokens, k)
            stats = got.stats
            runs.ratios[k].append(stats.tokens_per_second / plain.stats.tokens_per_second)
            runs.per_round[k].append(stats.tokens_per_round)
            runs.count_acceptance(stats)
            if k == counts[0]:
                runs.draft_ms.append(1e3 * stats.draft_seconds / stats.rounds)
            runs.differing += got.token_ids != plain.token_ids
    return runs


def measure(pair: Pair, num_prompts: int, tokens: int, until: float, quick: bool) -> dict[str, Any]:
    """Ratios of one pair, and its ceiling if it misses its goal."""
    counts = [k for k in pair.counts if not quick or k < 4]
    num_prompts = max(1, round(num_prompts * pair.share))
    with pair.load() as engine:
        runs = run(engine, counts, num_prompts, tokens, until)
        by_k = {k: common.median(values) for k, values in runs.ratios.items()}
        best = max(by_k, key=lambda k: by_k[k])
        missed = pair.goal is not None and by_k[best] < pair.goal
        return {
            "ratio": by_k[best],
            "goal": pair.goal,
            "best_num_draft_tokens": best,
            "by_num_draft_tokens": by_k,
            "tokens_per_round": {k: common.median(v) for k, v in runs.per_round.items()},
            "acceptance": runs.acceptance(),
            "draft_weight_types": draft_types(engine),
            "plain_step_ms": common.median(runs.plain_ms),
            "draft_round_ms": {counts[0]: common.median(runs.draft_ms)},
            "prompts": len(runs.plain_ms),
            "answers_that_differ_from_plain": runs.differing,
            "ceiling": ceiling(engine, runs.acceptance(), 4 if quick else 12) if missed else None,
        }


def draft_types(engine: Any) -> dict[str, float] | None:
    """GGML types of the draft's matrices, by their share of the weights; None in PyTorch."""
    from anydraft.backends.self_draft import weight_types

    header = getattr(engine.drafter.model, "header", None)
    return None if header is None else weight_types(header.path)


def ceiling(engine: Any, acceptance: list[float], seconds: float) -> dict[str, Any]:
    """What the cost model makes of measured costs and acceptance."""
    from anydraft.measure.advise import ceiling as at_best
    from anydraft.measure.probe import probe

    widths = (1, 2, 3, 4, 5, 7, 9)
    profile = probe(
        engine, seconds=seconds, widths=widths, contexts=(64,), sampled=False, keep=False
    )
    model = profile.speed_model(acceptance)
    best = max(range(1, 17), key=model.speedup)
    return {
        "speedup": model.speedup(best),
        "num_draft_tokens": best,
        "with_a_free_draft": at_best(model.with_free_draft()),
        "with_a_perfect_draft": at_best(model.with_acceptance(1.0)),
        "verify_ms": {n: 1e3 * model.verify(n) for n in widths},
        "draft_ms": {k: 1e3 * model.draft(k) for k in (1, 2, 4)},
        "acceptance": acceptance,
        "quiet": profile.quiet.why_not() or "yes",
    }


def report(results: dict[str, Any]) -> str:
    """The table, the drafts' types and acceptance, and the ceilings of what was missed."""
    rows = [
        [name, f"{r['ratio']:.2f}", "" if r["goal"] is None else f"{r['goal']:.2f}"]
        + [r["best_num_draft_tokens"], f"{r['plain_step_ms']:.1f}"]
        + [" ".join(f"{a:.2f}" for a in r["acceptance"][:4]), r["prompts"]]
        + [r["answers_that_differ_from_plain"]]
        for name, r in results.items()
    ]
    header = ["pair", "best / plain", "goal", "K", "plain step, ms", "acceptance by position"]
    lines = [common.table([*header, "prompts", "answers that differ"], rows)]
    for name, r in results.items():
        by_k = ", ".join(f"{k}: {v:.2f}" for k, v in r["by_num_draft_tokens"].items())
        lines.append(f"{name}: by K {by_k}")
        if r["draft_weight_types"]:
            types = ", ".join(f"{share:.0%} {t}" for t, share in r["draft_weight_types"].items())
            lines.append(f"  the draft's weights: {types}")
        if (c := r["ceiling"]) is not None:
            verify = ", ".join(f"v({n}) {ms:.1f}" for n, ms in c["verify_ms"].items())
            drafts = ", ".join(f"K={k} {ms:.1f}" for k, ms in c["draft_ms"].items())
            lines.append(
                f"  ceiling of the cost model: {c['speedup']:.2f}x at K={c['num_draft_tokens']}; "
                f"{c['with_a_free_draft']:.2f}x if the draft cost nothing, "
                f"{c['with_a_perfect_draft']:.2f}x if it were always right (quiet: {c['quiet']})\n"
                f"  measured, ms: {verify}; draft {drafts}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair, under 50 seconds")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--pair", action="append", help="only pairs whose name contains this")
    args = parser.parse_args()
    started = time.perf_counter()
    names = [n for n in PAIRS if any(part in n for part in args.pair or [""])]
    if not names:
        parser.error(f"no pair is called so; there are: {'; '.join(PAIRS)}")
    prompts, tokens = (6, 20) if args.quick else (12, 48)
    results = {}
    for name in names[:QUICK_PAIRS] if args.quick else names:
        limit = started + 32 if args.quick else float("inf")
        results[name] = measure(PAIRS[name], prompts, tokens, limit, args.quick)
        print(f"{name}: {results[name]['ratio']:.2f}", file=sys.stderr)
    print(common.machine_line(), file=sys.stderr)
    print(report(results), file=sys.stderr)
    if args.json:
        ratios = {name: r["ratio"] for name, r in results.items()}
        print(json.dumps({**ratios, "details": results, "machine": common.machine()}))


if __name__ == "__main__":
    main()
