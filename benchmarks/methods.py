"""Speed of every way to draft and verify sampled answers, and of what auto takes.

All methods answer the same prompts with the same models, in turn, prompt by prompt, so that a slow
minute of the machine is everybody's. Plain decoding runs beside them, and so does transformers with
the same weights in float32, sampled, with the same draft model and as many tokens per round. The
choice of auto under the guarantee "distribution" is made first, from its own measurements, and
compared with the fastest.

    python benchmarks/methods.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import common
from anydraft.measure.timed import TimedModel
from overhead import plain_steps
from vs_transformers import Peer, Run

PEER = "transformers"


def run(
    engines: dict[str, Any],
    models: tuple[TimedModel, TimedModel],
    peer: Callable[[str], Run],
    args: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """method -> tokens, seconds after the first round, rounds, and time outside model passes."""
    found: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(("tokens", "rounds", "generated", "rows"), 0)
        | {"seconds": 0.0, "outside": 0.0}
        for name in engines
    }
    speeds: dict[str, list[float]] = {name: [] for name in (*engines, PEER)}
    steps: list[float] = []
    for prompt in common.spread(common.prompts("general"), args.prompts):
        speeds[PEER].append(peer(prompt.text).speed)
        for name, engine in engines.items():
            for model in models:
                model.passes.clear()
            began = time.perf_counter()
            answer = engine.generate(
                prompt.text,
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=1,
                ignore_eos=True,
            )
            wall = time.perf_counter() - began
            stats = answer.stats
            if stats.draft_error:
                raise SystemExit(f"{name}: the draft failed: {stats.draft_error}")
            row = found[name]
            speeds[name].append(stats.tokens_per_second)
            row["tokens"] += stats.generated_tokens - stats.first_round_tokens
            row["seconds"] += stats.total_seconds - stats.first_token_seconds
            row["rounds"] += stats.rounds
            row["generated"] += stats.generated_tokens
            row["outside"] += wall - sum(model.seconds for model in models)
            row["rows"] += sum(one.rows for one in models[0].passes)
            if name == "plain":
                steps += plain_steps(models[0])
    for name, row in found.items():
        row["vs_transformers"] = common.median(
            ours / theirs for ours, theirs in zip(speeds[name], speeds[PEER], strict=True)
        )
        row["outside_ms_per_row"] = 1000 * row["outside"] / row["rows"]
        row["outside_of_plain_step"] = row["outside"] / row["rows"] / common.median(steps)
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
    from anydraft.drafters import make_drafter
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
    target, draft = TimedModel(loaded.target), TimedModel(loaded.drafter.model)
    drafter = make_drafter(draft, target.vocabulary)
    pair = target, drafter, args.num_draft_tokens
    engines = {
        str(method): anydraft.Engine(*pair, method=str(method))
        for method in offered(loaded.laws)
        if method.law not in ("union", "slrs")
    }
    for engine in engines.values():  # tables are made once per pair
        engine.generate("Warm", max_tokens=2, temperature=1.0, seed=1)
    plain_engine = anydraft.Engine(target, None, 0)
    transformers = Peer(args.target, args.draft, "float32")

    def peer(text: str) -> Run:
        ids = plain_engine.vocabulary.encode_prompt(text)
        return transformers.sampled(ids, args.max_tokens, args.num_draft_tokens, args.temperature)

    found = run({"plain": plain_engine, **engines}, (target, draft), peer, args)
    plain = found["plain"]["tokens_per_second"]
    best = max(engines, key=lambda name: found[name]["tokens_per_second"])
    rows = [
        [
            name + (" (auto)" if name == str(choice.method) else ""),
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / plain:.2f}",
            f"{row['vs_transformers']:.2f}",
            f"{row['outside_ms_per_row']:.2f}",
            f"{row['outside_of_plain_step']:.1%}",
        ]
        for name, row in found.items()
    ]
    header = ["method", "tokens per round", "tokens/s", "of plain", "of transformers'"]
    print(common.table([*header, "outside passes, ms per row", "of a plain step"], rows))
    share = found[str(choice.method)]["tokens_per_second"] / found[best]["tokens_per_second"]
    ahead = found[str(choice.method)]["vs_transformers"]
    print(
        f"\nauto is at {100 * share:.1f} % of the fastest ({best}), "
        f"at {ahead:.2f} of transformers' own sampled drafting; {common.machine_line()}"
    )
    if args.json:
        seconds = round(time.perf_counter() - started, 1)
        summary = {
            "auto": str(choice.method),
            "best": best,
            "auto_of_best": share,
            "auto_vs_transformers": ahead,
        }
        summary |= {"overlap": choice.overlap, "methods": found, "seconds": seconds}
        print(json.dumps({**summary, "machine": common.machine()}))
    loaded.close()


if __name__ == "__main__":
    main()
