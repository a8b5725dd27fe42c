"""Speed of every way to draft and verify sampled answers, and of what auto takes.

All methods answer the same prompts with the same models, in turn, prompt by prompt, so that a slow
minute of the machine is everybody's. Plain decoding runs beside them. The choice of auto under the
guarantee "distribution" is made first, from its own measurements, and compared with the fastest.

    python benchmarks/methods.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import common


def run(engines: dict[str, Any], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """method -> tokens, seconds after the first round, rounds and acceptance of the first."""
    found: dict[str, dict[str, Any]] = {
        name: {"tokens": 0, "seconds": 0.0, "rounds": 0, "generated": 0} for name in engines
    }
    for prompt in common.spread(common.prompts("general"), args.prompts):
        for name, engine in engines.items():
            answer = engine.generate(
                prompt.text,
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=1,
                ignore_eos=True,
            )
            stats = answer.stats
            if stats.draft_error:
                raise SystemExit(f"{name}: the draft failed: {stats.draft_error}")
            row = found[name]
            row["tokens"] += stats.generated_tokens - stats.first_round_tokens
            row["seconds"] += stats.total_seconds - stats.first_token_seconds
            row["rounds"] += stats.rounds
            row["generated"] += stats.generated_tokens
    for row in found.values():
        row["tokens_per_second"] = row["tokens"] / row["seconds"]
        row["tokens_per_round"] = row["generated"] / row["rounds"]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=common.TARGET)
    parser.add_argument("--draft", default=common.DRAFT)
    parser.add_argument("--draft-dtype", help="default: the backend's")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--quick", action="store_true", help="fewer tokens; under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 4), min(args.max_tokens, 24)
    import anydraft
    from anydraft.methods import offered

    started = time.perf_counter()
    loaded = anydraft.load(
        args.target,
        args.draft,
        num_draft_tokens=args.num_draft_tokens,
        guarantee="distribution",
        draft_options=common.load_draft_options(args.draft_dtype),
    )
    choice = loaded.choice_for(anydraft.SamplingParams(temperature=args.temperature))
    print(f"auto takes {choice.method}: {choice.reason}\n", flush=True)
    pair = loaded.target, loaded.drafter, args.num_draft_tokens
    engines = {
        str(method): anydraft.Engine(*pair, method=str(method))
        for method in offered(loaded.laws)
        if method.law not in ("union", "slrs")
    }
    found = run({"plain": loaded.plain(), **engines}, args)
    plain = found["plain"]["tokens_per_second"]
    best = max(engines, key=lambda name: found[name]["tokens_per_second"])
    rows = [
        [
            name + (" (auto)" if name == str(choice.method) else ""),
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / plain:.2f}",
        ]
        for name, row in found.items()
    ]
    print(common.table(["method", "tokens per round", "tokens/s", "of plain"], rows))
    share = found[str(choice.method)]["tokens_per_second"] / found[best]["tokens_per_second"]
    print(f"\nauto is at {100 * share:.1f} % of the fastest ({best}); {common.machine_line()}")
    if args.json:
        seconds = round(time.perf_counter() - started, 1)
        summary = {"auto": str(choice.method), "best": best, "auto_of_best": share}
        summary |= {"overlap": choice.overlap, "methods": found, "seconds": seconds}
        print(json.dumps({**summary, "machine": common.machine()}))
    loaded.close()


if __name__ == "__main__":
    main()
