"""The tables of a report: an overview of all pairs, and everything measured of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anydraft.measure.bench_plan import Contender
from anydraft.measure.report_view import View
from anydraft.measure.report_words import won

Table = tuple[list[str], list[list[str]]]
"""(header, rows), plain text."""

_WORDS = {True: "pays", False: "does not pay", None: "even"}


def verdict(view: View) -> str:
    """Two words on a pair; "" where nothing was drafted."""
    return "" if view.best is None else _WORDS[won(view)]


def overview(views: Sequence[View]) -> Table:
    """One row per pair."""
    header = ["pair", "verdict", "best K", "speed-up", "95 % interval", "predicted", "adaptive",
              "first token right", "same tokens"]  # fmt: skip
    rows = []
    for view in views:
        best, adaptive = view.best, view.adaptive
        predicted = None if best is None else view.predicted(best)
        rows.append(
            [
                view.title,
                verdict(view),
                "" if best is None else str(best["num_draft_tokens"]),
                _speedup(best),
                _interval(best),
                "" if predicted is None else f"{predicted:.2f}",
                _speedup(adaptive),
                f"{best['acceptance'][0]:.0%}" if best and best["acceptance"] else "",
                _same(view.identity()),
            ]
        )
    return _without_empty(header, rows)


def cells(view: View) -> Table:
    """One row per contender."""
    header = ["", "tokens/s", "speed-up", "95 % interval", "median", "predicted", "tokens/round",
              "first token, s", "J/token", "same tokens"]  # fmt: skip
    rows = []
    for cell in view.cells:
        plain = cell["contender"] == "plain"
        predicted = view.predicted(cell)
        speedup = cell["speedup"]
        rows.append(
            [
                contender(cell, view.entry),
                _number(cell["tokens_per_second"], 1),
                "1" if plain else _speedup(cell),
                "" if plain else _interval(cell),
                "" if plain or not speedup else f"{speedup['median']:.2f}",
                "" if predicted is None else f"{predicted:.2f}",
                _number(cell["tokens_per_round"], 2),
                _number(cell["first_token_seconds"], 2),
                _number(cell["joules_per_token"], 2),
                "" if plain else _same(cell["identity"]),
            ]
        )
    return _without_empty(header, rows)


def kinds(view: View) -> Table | None:
    """Speed-up by kind of text; None where there is only one kind."""
    found = [c for c in view.cells if c["contender"] == "draft" and c["speedup"]]
    names = list(dict.fromkeys(kind for c in found for kind in c["speedup_by_kind"]))
    if len(names) < 2:
        return None
    header = ["", *(name.replace("_", " ") for name in names)]
    rows = [
        [contender(c, view.entry), *(_number(c["speedup_by_kind"].get(n), 2) for n in names)]
        for c in found
    ]
    return header, rows


def contender(cell: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """A contender in words."""
    runtime = {"torch_hf": "transformers' generate()"}.get(entry["target"]["runtime"], "native")
    kind, length = cell["contender"], cell["num_draft_tokens"]
    if kind == "plain":
        return "plain decoding"
    if kind == "native":
        return runtime
    if kind == "native_draft":
        return f"{runtime} with the draft, K = {length}"
    method = "" if cell["method"] == Contender("draft").method else f", {cell['method']}"
    return f"adaptive{method}" if length == "auto" else f"K = {length}{method}"


def _speedup(cell: Mapping[str, Any] | None) -> str:
    return f"{cell['speedup']['geometric_mean']:.2f}" if cell and cell["speedup"] else ""


def _interval(cell: Mapping[str, Any] | None) -> str:
    if not cell or not cell["speedup"]:
        return ""
    return f"{cell['speedup']['low']:.2f} to {cell['speedup']['high']:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _same(counts: Mapping[str, int]) -> str:
    compared = sum(n for name, n in counts.items() if name != "not compared")
    if not compared:
        return ""
    text = f"{counts.get('identical', 0)} of {compared}"
    for name in ("near-tie", "violation"):
        if counts.get(name):
            text += f", {counts[name]} {name}{'s' if counts[name] > 1 else ''}"
    return text


def _without_empty(header: list[str], rows: list[list[str]]) -> Table:
    """The table without columns in which nothing stands."""
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
