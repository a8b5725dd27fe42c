"""Were the predictions right? Reads the study's results and compares; can redo a part of them.

A cell is one configuration at one fixed K. It was predicted from a probe of costs and from other
prompts, before it was measured. Asked for: the sign right in every configuration (does the best K
pay?), half of all cells within 10 %, nine of ten within 20 %.

    python benchmarks/study/check.py [--json] [--torch-only] [--redo] [--markdown]

`--redo` measures a random tenth of the cells again, on the same prompts, and says how far the new
figures are from the stored ones. Exit code 1 if something asked for does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configurations import CONFIGURATIONS, Configuration, by_name, loader
from run import Lines, folder

from anydraft.errors import AnydraftError
from anydraft.measure import bench, bench_results
from anydraft.measure.report_view import View, views

MEDIAN, NINE_OF_TEN = 0.10, 0.20
EVEN = 0.03
"""A best K so close to plain decoding has no sign."""
SAME = 0.15
"""A redone cell may be off by so much: another run, another day of the machine."""


@dataclass(frozen=True)
class Cell:
    """One configuration at one K.

    Attributes:
        predicted, measured: speed-ups.
        error: predicted / measured - 1.
    """

    configuration: str
    num_draft_tokens: int
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def load(where: Path) -> dict[str, View]:
    """The configurations that have been measured, by name.

    Raises:
        AnydraftError: a file is damaged or of another version.
    """
    found = {}
    for configuration in CONFIGURATIONS:
        path = where / f"{configuration.name}.json"
        if path.exists() and (made := views(bench_results.read(path))):
            found[configuration.name] = made[0]
    return found


def cells(found: dict[str, View]) -> list[Cell]:
    """All predicted and measured cells of fixed K."""
    made = []
    for name, view in found.items():
        for cell in view.drafted("match"):
            predicted = view.predicted(cell)
            if predicted is None:
                continue
            speed = cell["speedup"]
            made.append(
                Cell(name, int(cell["num_draft_tokens"]), predicted, speed["geometric_mean"],
                     speed["low"], speed["high"])
            )  # fmt: skip
    return made


def signs(found: dict[str, View], all_cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Per configuration: the best K as predicted and as measured, and whether both say the same."""
    result = {}
    for name, view in found.items():
        own = [c for c in all_cells if c.configuration == name]
        if not own:
            continue
        best = max(own, key=lambda c: c.measured)
        hoped = max(own, key=lambda c: c.predicted)
        even = abs(best.measured - 1) < EVEN or abs(hoped.predicted - 1) < EVEN
        result[name] = {
            "title": view.title,
            "best_k": best.num_draft_tokens,
            "measured": best.measured,
            "predicted_best_k": hoped.num_draft_tokens,
            "predicted": hoped.predicted,
            "right": even or (best.measured > 1) == (hoped.predicted > 1),
            "adaptive": _adaptive(view),
            "adaptive_over_best_fixed": _over_best(view, best),
        }
    return result


def _adaptive(view: View) -> float | None:
    cell = view.adaptive
    return None if cell is None else float(cell["speedup"]["geometric_mean"])


def _over_best(view: View, best: Cell) -> float | None:
    adaptive = _adaptive(view)
    return None if adaptive is None else adaptive / max(best.measured, 1.0)


def verdict(found: dict[str, View]) -> dict[str, Any]:
    """Everything that is asked of the predictions, and whether it holds."""
    all_cells = cells(found)
    errors = sorted(abs(c.error) for c in all_cells)
    median = statistics.median(errors) if errors else None
    within = sum(e <= NINE_OF_TEN for e in errors) / len(errors) if errors else 0.0
    sign = signs(found, all_cells)
    missing = [c.name for c in CONFIGURATIONS if c.name not in found]
    identity: dict[str, int] = {}
    for view in found.values():
        for name, count in view.identity().items():
            identity[name] = identity.get(name, 0) + count
    return {
        "cells": [asdict(c) | {"error": c.error} for c in all_cells],
        "num_cells": len(all_cells),
        "median_error": median,
        "share_within_20_percent": within,
        "signs": sign,
        "signs_right": all(s["right"] for s in sign.values()),
        "identity": identity,
        "missing": missing,
        "passed": median is not None
        and median <= MEDIAN
        and within >= 0.9
        and all(s["right"] for s in sign.values())
        and not identity.get("violation"),
    }


# --- measuring again ------------------------------------------------------------------------------


def redo(where: Path, found: dict[str, View], seed: int) -> list[dict[str, Any]]:
    """A random tenth of the cells, measured again on the same prompts.

    Raises:
        AnydraftError: a model cannot be loaded.
    """
    all_cells = cells(found)
    count = max(1, round(len(all_cells) / 10)) if all_cells else 0
    chosen = random.Random(seed).sample(all_cells, count)
    made = []
    for name in dict.fromkeys(c.configuration for c in chosen):
        own = [c for c in chosen if c.configuration == name]
        print(f"{name}: K = {', '.join(str(c.num_draft_tokens) for c in own)}", file=sys.stderr)
        again = _measure(by_name(name), where / f"{name}.json", own)
        for cell in own:
            measured = again[cell.num_draft_tokens]
            made.append(
                {
                    "configuration": name,
                    "num_draft_tokens": cell.num_draft_tokens,
                    "stored": cell.measured,
                    "redone": measured,
                    "difference": measured / cell.measured - 1,
                    "agrees": abs(measured / cell.measured - 1) <= SAME,
                }
            )
    return made


def _measure(configuration: Configuration, path: Path, own: Sequence[Cell]) -> dict[int, float]:
    stored = bench_results.read(path)
    plan, _ = bench.continue_(stored)
    lengths = tuple(c.num_draft_tokens for c in own)
    plan = replace(plan, num_draft_tokens=lengths, predict=False)
    results = bench.begin(plan)
    bench.run(plan, results, lambda _: None, load=loader(configuration), progress=Lines())
    (view,) = views(results)
    return {
        int(c["num_draft_tokens"]): float(c["speedup"]["geometric_mean"])
        for c in view.drafted("match")
    }


# --- what is shown --------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'configuration':42}{'K':>3}{'measured':>10}{'predicted':>11}{'error':>8}"]
    for cell in result["cells"]:
        title = result["signs"][cell["configuration"]]["title"]
        lines.append(
            f"{title[:41]:42}{cell['num_draft_tokens']:>3}{cell['measured']:>10.2f}"
            f"{cell['predicted']:>11.2f}{cell['error']:>+8.0%}"
        )
    lines.append("")
    for sign in result["signs"].values():
        adaptive = sign["adaptive"]
        tail = "" if adaptive is None else f", adaptive {adaptive:.2f}"
        lines.append(
            f"{'right' if sign['right'] else 'WRONG'}: {sign['title']}: best "
            f"{sign['measured']:.2f} at K = {sign['best_k']}, predicted "
            f"{sign['predicted']:.2f} at K = {sign['predicted_best_k']}{tail}"
        )
    if result["num_cells"]:
        lines += [
            "",
            f"{result['num_cells']} cells: median error {result['median_error']:.1%} (asked for: "
            f"{MEDIAN:.0%}), {result['share_within_20_percent']:.0%} within 20 % (asked for: 90 %)",
        ]
    if result["missing"]:
        lines.append(f"not measured yet: {', '.join(result['missing'])}")
    for cell in result.get("redone", ()):
        lines.append(
            f"redone: {cell['configuration']} K = {cell['num_draft_tokens']}: stored "
            f"{cell['stored']:.2f}, now {cell['redone']:.2f} ({cell['difference']:+.0%})"
        )
    lines.append("passed" if result["passed"] else "NOT passed")
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    """The study's table: measured speed-up by K, predictions in brackets."""
    ks = sorted({c["num_draft_tokens"] for c in result["cells"]})
    lines = ["| configuration | " + " | ".join(f"K = {k}" for k in ks) + " | adaptive |"]
    lines.append("|" + "---|" * (len(ks) + 2))
    for name, sign in result["signs"].items():
        own = {c["num_draft_tokens"]: c for c in result["cells"] if c["configuration"] == name}
        row = [
            f"{own[k]['measured']:.2f} ({own[k]['predicted']:.2f})" if k in own else "" for k in ks
        ]
        adaptive = "" if sign["adaptive"] is None else f"{sign['adaptive']:.2f}"
        lines.append(f"| {sign['title']} | " + " | ".join(row) + f" | {adaptive} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--markdown", action="store_true", help="the table for docs/study.md")
    parser.add_argument("--redo", action="store_true", help="measure a random tenth again")
    parser.add_argument("--seed", type=int, default=None, help="which tenth; default: drawn")
    parser.add_argument("--torch-only", action="store_true", help="the pairs in PyTorch alone")
    parser.add_argument("--results", type=Path, default=None, help="another folder of results")
    args = parser.parse_args()
    where = args.results or folder(args.torch_only, quick=False)
    try:
        found = load(where)
        if not found:
            print(f"there are no results in {where}: run run.py first", file=sys.stderr)
            return 1
        result = verdict(found)
        if args.redo:
            seed = random.randrange(1 << 32) if args.seed is None else args.seed
            result["redone"] = redo(where, found, seed)
            result["redo_seed"] = seed
            result["passed"] = result["passed"] and all(c["agrees"] for c in result["redone"])
    except AnydraftError as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    else:
        print(markdown(result) if args.markdown else show(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
