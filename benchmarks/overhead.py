"""Time outside model passes: drafting logic, retokenising, sampling, bookkeeping.

Both models' passes (`extend` and, where greedy requests take it, `extend_greedy`) are timed;
whatever of a generation's wall time is spent outside is overhead. It is given relative to the
median plain step under the same sampling (one target pass over one token; a greedy one needs no
logits and is shorter): per round, and per row of the target's passes (a round with K candidates
has K + 1 rows).

    python benchmarks/overhead.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import common
from anydraft.measure.timed import TimedModel

CASES: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("plain, greedy", None, {}),
    ("draft model, greedy", "model", {}),
    ("lookup, greedy", "lookup", {}),
    ("plain, T=1", None, {"temperature": 1.0}),
    ("draft model, T=1", "model", {"temperature": 1.0}),
    ("tli+rejection, T=1", "model", {"temperature": 1.0, "method": "tli+rejection"}),
    ("ttp+rejection, T=1", "model", {"temperature": 1.0, "method": "ttp+rejection"}),
    ("ttp+block, T=1", "model", {"temperature": 1.0, "method": "ttp+block"}),
)


def plain_steps(target: TimedModel) -> list[float]:
    """Seconds of the passes of one sequence over one token."""
    return [one.seconds for one in target.passes if one.sequences == one.tokens == 1]


def run_case(
    target: TimedModel,
    drafter: Any,
    draft: TimedModel,
    args: argparse.Namespace,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """One case over all prompts: seconds outside model passes, rounds, rows."""
    import anydraft

    fields = dict(fields)
    method = fields.pop("method", "match")
    engine = anydraft.Engine(target, drafter, args.num_draft_tokens, method=method)
    if method != "match":  # its table is made once per pair
        engine.generate("Warm", max_tokens=4, seed=1, ignore_eos=True, **fields)
    outside = rounds = rows = 0.0
    tokens = 0
    singles: list[float] = []
    for prompt in common.spread(common.prompts("general"), args.prompts):
        target.passes.clear()
        draft.passes.clear()
        started = time.perf_counter()
        answer = engine.generate(
            prompt.text, max_tokens=args.max_tokens, ignore_eos=True, seed=1, **fields
        )
        wall = time.perf_counter() - started
        outside += wall - target.seconds - draft.seconds
        rows += sum(one.rows for one in target.passes)
        rounds += answer.stats.rounds
        tokens += len(answer.token_ids)
        singles += plain_steps(target)
    return {
        "tokens": tokens,
        "rounds": int(rounds),
        "outside_ms_per_round": 1000 * outside / rounds,
        "outside_ms_per_row": 1000 * outside / rows,
        "singles": singles,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases on one pair of models."""
    import anydraft
    from anydraft.drafters import make_drafter

    loaded = anydraft.load(
        args.target, args.draft, draft_options=common.load_draft_options(args.draft_dtype)
    )
    target, draft = TimedModel(loaded.target), TimedModel(loaded.drafter.model)
    drafters = {
        None: None,
        "lookup": make_drafter("lookup", target.vocabulary),
        "model": make_drafter(draft, target.vocabulary),
    }
    warm = anydraft.Engine(target, drafters["model"], 2)
    warm.generate("Warm", max_tokens=8, ignore_eos=True)
    cases = {
        name: run_case(target, drafters[kind], draft, args, fields) for name, kind, fields in CASES
    }
    steps = {
        name: 1000 * common.median(cases[f"plain, {name}"]["singles"]) for name in ("greedy", "T=1")
    }
    for name, case in cases.items():
        del case["singles"]
        step = steps[name.rsplit(", ")[-1]]
        case["share_of_plain_step_per_round"] = case["outside_ms_per_round"] / step
        case["share_of_plain_step_per_row"] = case["outside_ms_per_row"] / step
    return {"plain_step_ms": steps, "cases": cases}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=common.TARGET)
    parser.add_argument("--draft", default=common.DRAFT)
    parser.add_argument("--draft-dtype", help="default: the backend's")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="64 tokens; under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.quick:
        args.max_tokens = min(args.max_tokens, 64)
    result = measure(args)
    steps = ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["plain_step_ms"].items())
    print(f"{common.machine_line()}; one plain step: {steps}")
    print()
    header = ["case", "tokens", "rounds", "ms per round", "of a plain step", "per row"]
    rows = [
        [
            name,
            case["tokens"],
            case["rounds"],
            f"{case['outside_ms_per_round']:.2f}",
            f"{case['share_of_plain_step_per_round']:.1%}",
            f"{case['share_of_plain_step_per_row']:.1%}",
        ]
        for name, case in result["cases"].items()
    ]
    print(common.table(header, rows))
    if args.json:
        cases = result["cases"]
        summary = {
            "greedy_per_round": max(
                case["share_of_plain_step_per_round"] for n, case in cases.items() if "greedy" in n
            ),
            "sampled_per_row": max(
                case["share_of_plain_step_per_row"] for n, case in cases.items() if "T=1" in n
            ),
        }
        print(json.dumps({**summary, **result, "machine": common.machine()}))


if __name__ == "__main__":
    main()
