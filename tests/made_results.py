"""A result file as `anydraft bench` writes it, with runs made from chosen costs and acceptance."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from anydraft.measure import bench_results, bench_stats
from anydraft.measure.bench_plan import PairSpec, Plan
from anydraft.speed import Curve, SpeedModel

MACHINE = {"cpu": "a CPU", "cores": 2, "threads": 2, "gpu": None, "system": "Linux", "torch": "2"}


@dataclass(frozen=True)
class MadePair:
    """A pair with constant acceptance, draft seconds per token and cost of an extra row."""

    name: str
    acceptance: float
    draft: float
    row: float
    note: str = ""
    adaptive: float | None = None


PAIRS = (
    MadePair("quick draft", 0.75, 0.004, 0.08, adaptive=1.7),
    MadePair("slow draft", 0.75, 0.035, 0.08),
    MadePair("serial target", 0.8, 0.004, 0.9, note="Each token is verified in a pass of its own."),
    MadePair("wrong draft", 0.1, 0.006, 0.2),
)
STEP = 0.03  # seconds of a pass over one token


def made_results(
    pairs: tuple[MadePair, ...] = PAIRS, lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
) -> dict[str, Any]:
    """Results over three prompts of two kinds; every run's speed is its model's, and some noise."""
    specs = tuple(PairSpec("big", p.name, name=p.name, note=p.note) for p in pairs)
    plan = Plan(pairs=specs, num_draft_tokens=(*lengths, "auto"))
    results = bench_results.new(plan.to_dict(), MACHINE)
    results["prompts"] = [
        {"id": f"p{i}", "kind": kind, "turns": 1, "digest": str(i)}
        for i, kind in enumerate(("writing", "code", "code"))
    ]
    source = random.Random(0)
    for pair in pairs:
        model = _model(pair)
        results["pairs"].append(_entry(pair, model))
        for prompt in results["prompts"]:
            for length in (0, *lengths, *(["auto"] if pair.adaptive else [])):
                results["runs"].append(_run(pair, model, prompt, length, source))
    results["cells"] = bench_stats.summarise(results["runs"])
    results["complete"] = True
    return results


def _model(pair: MadePair) -> SpeedModel:
    return SpeedModel(
        acceptance=(pair.acceptance,),
        verify=Curve({n: STEP * (1 + pair.row * (n - 1)) for n in range(1, 18)}),
        draft=Curve({k: pair.draft * k for k in range(17)}),
    )


def _entry(pair: MadePair, model: SpeedModel) -> dict[str, Any]:
    ks = range(9)
    return {
        "id": pair.name,
        "target": {"name": "big", "runtime": "torch_hf", "dtype": "float32", "options": {}},
        "draft": {"name": pair.name, "runtime": "torch_hf", "dtype": "int4", "options": {}},
        "note": pair.note,
        "native": "not asked for",
        "memory": {"before": 1, "loaded": 2, "running": 1_900_000_000},
        "prediction": {
            "context": 100,
            "verify_seconds": {str(n): s for n, s in model.verify.points.items()},
            "draft_seconds": {str(k): s for k, s in model.draft.points.items()},
            "overhead_seconds": 0.0,
            "quiet": True,
            "not_quiet": "",
            "memory": 1,
            "sampling": {
                "greedy": {
                    "acceptance": [pair.acceptance] * 8,
                    "offered": [1.0] * 8,
                    "speedup": {str(k): 1.05 * model.speedup(k) if k else 1.0 for k in ks},
                    "free_draft": {str(k): model.with_free_draft().speedup(k) for k in ks},
                    "all_accepted": {str(k): model.with_acceptance(1.0).speedup(k) for k in ks},
                    "best": model.best(8),
                    "break_even": model.break_even(8),
                    "row_cost": model.row_cost(8),
                    "draft_cost": model.draft(1) / model.verify(1),
                }
            },
        },
    }


def _run(
    pair: MadePair, model: SpeedModel, prompt: dict[str, Any], length: Any, source: random.Random
) -> dict[str, Any]:
    fixed = 0 if length == "auto" else int(length)
    rounds = 40
    tokens = round(rounds * model.tokens_per_round(fixed))
    seconds = tokens * model.seconds_per_token(fixed) * source.uniform(0.97, 1.03)
    if length == "auto":
        seconds = tokens * model.seconds_per_token(0) / (pair.adaptive or 1.0)
    reached = [round(100 * pair.acceptance**k) for k in range(fixed)]
    accepted = [round(r * pair.acceptance) for r in reached]
    return {
        "pair": pair.name,
        "sampling": "greedy",
        "prompt": prompt["id"],
        "turn": 0,
        "kind": prompt["kind"],
        "repeat": 0,
        "contender": "draft" if length else "plain",
        "method": "match",
        "num_draft_tokens": length,
        "tokens": tokens + 1,
        "output": "0",
        "first_tokens": 1,
        "seconds": seconds + 0.2,
        "first_seconds": 0.2,
        "rounds": rounds + 1,
        "draft_n": fixed * rounds,
        "draft_n_accepted": sum(accepted),
        "drafted_at": reached,
        "accepted_at": accepted,
        "later_draft_seconds": rounds * model.draft(fixed) if fixed else 0.0,
        "later_target_seconds": rounds * model.verify(fixed + 1),
        "later_overhead_seconds": rounds * 0.0005,
        "passes": {
            str(width): [count, model.verify(width)]
            for width, count in (((1, 10), (3, 30)) if length == "auto" else ((fixed + 1, rounds),))
        },
        "finish_reason": "length",
        "draft_error": None,
        "joules": None,
        "identity": "identical",
    }
