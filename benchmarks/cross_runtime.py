"""Drafts from another runtime: PyTorch targets with GGUF drafts in llama.cpp, and the reverse.

Greedy, against our own plain decoding of the same target. Every prompt goes through plain decoding
and every K in turn, so that a machine that is busy for a while slows all of them; a figure is the
median over prompts of the ratio of tokens/s after the prompt's pass, at the best K of the pair.
Every drafted answer is compared with the plain one.

    python benchmarks/cross_runtime.py [--quick] [--json]

The JSON object has, per pair, the best ratio and its K, the ratio of every K, tokens per round, and
the time of a draft round and of a plain step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import common

PAIRS = {
    "gemma fp32 in torch, smollm2 Q4_1 in llama.cpp": (
        (common.TARGET, {}),
        (common.DRAFT, {"runtime": "llama_cpp"}),
    ),
    "gemma Q4_K_M in llama.cpp, smollm2 Q4_1 in llama.cpp": (
        (common.TARGET, {"runtime": "llama_cpp"}),
        (common.DRAFT, {"runtime": "llama_cpp"}),
    ),
    "gemma Q4_K_M in llama.cpp, smollm2 int4 in torch": (
        (common.TARGET, {"runtime": "llama_cpp"}),
        (common.DRAFT, {}),
    ),
}
QUICK_PAIRS = 1


@dataclass
class Measured:
    """One generation."""

    speed: float
    token_ids: list[int]
    stats: Any


def generate(engine: Any, prompt: str, count: int, num_draft_tokens: int) -> Measured:
    """Always `count` tokens: no end token stops it."""
    got = engine.generate(
        prompt, max_tokens=count, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )
    return Measured(got.stats.tokens_per_second, got.token_ids, got.stats)


def measure(pair: str, counts: list[int], num_prompts: int, tokens: int, until: float) -> Any:
    """Ratios of one pair; stops taking further prompts at `until`."""
    import anydraft

    (target, target_options), (draft, draft_options) = PAIRS[pair]
    engine = anydraft.load(target, draft=draft, draft_options=draft_options, **target_options)
    ratios: dict[int, list[float]] = {k: [] for k in counts}
    per_round: dict[int, list[float]] = {k: [] for k in counts}
    draft_ms: list[float] = []
    plain_ms: list[float] = []
    differing = 0
    with engine:
        for k in (0, *counts):
            generate(engine, "A first call, a first call", 6, k)
        for prompt in common.spread(common.prompts("general"), num_prompts):
            if plain_ms and time.perf_counter() > until:
                break
            plain = generate(engine, prompt.text, tokens, 0)
            plain_ms.append(1e3 / plain.speed)
            for k in counts:
                got = generate(engine, prompt.text, tokens, k)
                ratios[k].append(got.speed / plain.speed)
                per_round[k].append(got.stats.tokens_per_round)
                if k == 1:
                    draft_ms.append(1e3 * got.stats.draft_seconds / got.stats.rounds)
                differing += got.token_ids != plain.token_ids
    by_k = {k: common.median(values) for k, values in ratios.items()}
    best = max(by_k, key=lambda k: by_k[k])
    return {
        "ratio": by_k[best],
        "best_num_draft_tokens": best,
        "by_num_draft_tokens": by_k,
        "tokens_per_round": {k: common.median(values) for k, values in per_round.items()},
        "plain_step_ms": common.median(plain_ms),
        "draft_round_ms_at_1": common.median(draft_ms),
        "prompts": len(plain_ms),
        "answers_that_differ_from_plain": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair, under 50 seconds")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    started = time.perf_counter()
    names = list(PAIRS)[:QUICK_PAIRS] if args.quick else list(PAIRS)
    counts = [1, 2, 3] if args.quick else [1, 2, 3, 4, 6]
    prompts, tokens = (6, 20) if args.quick else (12, 48)
    results = {}
    for name in names:
        limit = started + 38 if args.quick else float("inf")
        results[name] = measure(name, counts, prompts, tokens, limit)
        print(f"{name}: {results[name]['ratio']:.2f}", file=sys.stderr)
    rows = [
        [name, f"{r['ratio']:.2f}", r["best_num_draft_tokens"], f"{r['plain_step_ms']:.1f}"]
        + [f"{r['draft_round_ms_at_1']:.1f}", r["prompts"], r["answers_that_differ_from_plain"]]
        for name, r in results.items()
    ]
    header = ["pair", "best / plain", "K", "plain step, ms", "draft round at K=1, ms", "prompts"]
    print(common.machine_line(), file=sys.stderr)
    print(common.table([*header, "answers that differ"], rows), file=sys.stderr)
    if args.json:
        ratios = {name: r["ratio"] for name, r in results.items()}
        print(json.dumps({**ratios, "details": results, "machine": common.machine()}))


if __name__ == "__main__":
    main()
