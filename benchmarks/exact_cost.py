"""What `--exact` costs on llama.cpp targets: passes of 1, 4 and 8 rows and a prompt.

Both models of a pair are loaded once each; their passes take turns. A figure is the median of the
paired ratios exact/normal of seconds, so above 1 is slower.

    python benchmarks/exact_cost.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import common

MODELS = (common.TARGET, common.DRAFT)
WIDTHS = (1, 4, 8)
CONTEXT = 128


def seconds_of(model: Any, state: Any, ids: list[int], rows: int) -> float:
    """One pass over `ids` after what `state` holds, which is as before afterwards."""
    before = state.length
    start = time.perf_counter()
    model.extend([(state, ids, rows)])
    taken = time.perf_counter() - start
    state.rollback(before)
    return taken


def measure(name: str, turns: int) -> dict[str, Any]:
    """Ratios of one model, and the milliseconds that they are made of."""
    from anydraft.backends import load_model

    modes = {
        "normal": load_model(name, runtime="llama_cpp", cache_prompt=False),
        "exact": load_model(name, runtime="llama_cpp", exact=True),
    }
    ids = [(7919 * n + 1) % modes["normal"].vocab_size for n in range(CONTEXT)]
    jobs = {f"{n} row{'s' * (n > 1)}": (ids[:n], n) for n in WIDTHS}
    jobs[f"prompt of {CONTEXT}"] = (ids, 1)
    taken: dict[str, dict[str, list[float]]] = {job: {mode: [] for mode in modes} for job in jobs}
    try:
        filled = {mode: model.new_state() for mode, model in modes.items()}
        for mode, model in modes.items():
            model.extend([(filled[mode], ids, 0)])
        for turn in range(turns + 1):
            for job, (new, rows) in jobs.items():
                for mode, model in modes.items():
                    state = filled[mode] if len(new) < CONTEXT else model.new_state()
                    seconds = seconds_of(model, state, new, rows)
                    if state is not filled[mode]:
                        state.close()
                    if turn:  # the first one warms up
                        taken[job][mode].append(seconds)
    finally:
        for model in modes.values():
            model.close()
    return {
        job: {
            "ratio": common.median(e / n for e, n in zip(of["exact"], of["normal"], strict=True)),
            **{f"{mode}_ms": 1e3 * common.median(values) for mode, values in of.items()},
        }
        for job, of in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    results = {name: measure(name, 5 if args.quick else 40) for name in MODELS}
    rows = [
        [name, job, f"{r['normal_ms']:.1f}", f"{r['exact_ms']:.1f}", f"{r['ratio']:.2f}"]
        for name, jobs in results.items()
        for job, r in jobs.items()
    ]
    print(common.machine_line(), file=sys.stderr)
    header = ["model", "pass", "normal, ms", "exact, ms", "exact / normal"]
    print(common.table(header, rows), file=sys.stderr)
    if args.json:
        print(json.dumps({**results, "machine": common.machine()}))


if __name__ == "__main__":
    main()
