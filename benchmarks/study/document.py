"""Writes docs/study.md from the study's results: every figure in it comes from the stored runs.

python benchmarks/study/document.py > docs/study.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from check import MEDIAN, load, markdown, verdict
from run import folder

from anydraft.errors import AnydraftError
from anydraft.measure import bench_results
from anydraft.measure.report_view import View
from anydraft.measure.report_words import paragraph

MOST_SHOWN = 9
TEMPLATE = Path(__file__).with_name("document.md")


def document(found: Mapping[str, View], machine: str) -> str:
    """The page."""
    result = verdict(dict(found))
    made = {
        "machine": machine,
        "table": markdown(result),
        "accuracy": _accuracy(result),
        "pairs": "\n\n".join(f"### {v.title}\n\n{paragraph(v)}" for v in found.values()),
        "isolation": _isolation(found),
        "widths": _widths(found.get("gemma_q4_smollm2")),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in made.items():
        text = text.replace(f"@{name}@", part)
    return text


def _accuracy(result: Mapping[str, Any]) -> str:
    wrong = [s["title"] for s in result["signs"].values() if not s["right"]]
    said = (
        f"Over {result['num_cells']} cells the predictions were off by "
        f"{result['median_error']:.1%} in the median (asked for: {MEDIAN:.0%}), and "
        f"{result['share_within_20_percent']:.0%} of them by at most 20 % (asked for: 90 %). "
    )
    if wrong:
        return said + f"Whether drafting pays was foretold wrongly for: {', '.join(wrong)}."
    return said + "Whether drafting pays was foretold rightly for every configuration."


def _isolation(found: Mapping[str, View]) -> str:
    """What the second study isolated: the same pair, verified in parallel and serially."""
    parallel, serial = found.get("smollm2_self"), found.get("smollm2_self_serial")
    if parallel is None or serial is None or parallel.best is None or serial.best is None:
        return ""
    best = [float(v.best["speedup"]["geometric_mean"]) for v in (parallel, serial) if v.best]
    length = parallel.best["num_draft_tokens"]
    same = next((c for c in serial.drafted() if c["num_draft_tokens"] == length), None)
    text = (
        "## Verification, parallel and serial\n\nThe serial pair is the first one but for one "
        "thing: each drafted token is verified in a pass of its own. At its best it comes to "
        f"{best[1]:.2f} times plain decoding, where parallel verification comes to {best[0]:.2f}."
    )
    if same is not None:
        text += (
            f" At K = {length} the parallel target reaches {best[0]:.2f}, the serial one "
            f"{same['speedup']['geometric_mean']:.2f}; draft, acceptance and tokens are the same."
        )
    return text


def _widths(view: View | None) -> str:
    """On which widths the adaptive policy's passes fall, where v(n) has steps."""
    if view is None or view.adaptive is None or 1 not in view.cost:
        return ""
    passes = {int(n): count for n, count in view.adaptive["passes"].items()}
    shown = sorted(n for n in {*view.cost, *passes} if n <= MOST_SHOWN)
    rows = ["| tokens in a pass | cost, plain steps | per token | passes |", "|---|---|---|---|"]
    for n in shown:
        cost = view.cost[n] / view.cost[1] if n in view.cost else None
        known = ["", ""] if cost is None else [f"{cost:.2f}", f"{cost / n:.2f}"]
        rows.append(f"| {n} | {known[0]} | {known[1]} | {passes.get(n, 0)} |")
    wider = sum(count for n, count in passes.items() if n > MOST_SHOWN)
    return "\n".join(
        [
            f"## The widths that the policy chose\n\n{view.title}: where further tokens come in "
            "steps, the adaptive policy should end its drafts before a step. Longer passes verify "
            "what lookup found.\n",
            *rows,
            f"\n{wider} passes were wider." if wider else "",
        ]
    ).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-only", action="store_true", help="from the pairs in PyTorch alone")
    parser.add_argument("--results", type=Path, default=None, help="another folder of results")
    args = parser.parse_args()
    where = args.results or folder(args.torch_only, quick=False)
    try:
        found = load(where)
        if not found:
            print(f"there are no results in {where}: run run.py first", file=sys.stderr)
            return 1
        results = bench_results.read(where / f"{next(iter(found))}.json")
        print(document(found, _machine(results["machine"])), end="")
    except AnydraftError as error:
        print(f"document.py: {error}", file=sys.stderr)
        return 1
    return 0


def _machine(facts: Mapping[str, Any]) -> str:
    names = (("PyTorch", "torch"), ("transformers", "transformers"), ("anydraft", "anydraft"))
    parts = [str(facts.get("cpu")), f"{facts.get('threads')} threads on {facts.get('cores')} cores"]
    parts += [f"{name} {facts[key]}" for name, key in names if facts.get(key)]
    return ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
