"""The charts of a benchmark as one picture, drawn by matplotlib (extra `report`)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydraft.errors import CacheError, RequestError
from anydraft.measure.report_tables import verdict
from anydraft.measure.report_view import Chart, View, charts, views
from anydraft.measure.report_words import paragraph

_STYLES: dict[str, dict[str, Any]] = {
    "measured": {"color": "#0b63c5", "marker": "o", "markersize": 4},
    "second": {"color": "#7a3fc4", "marker": "s", "markersize": 4, "linestyle": (0, (7, 3))},
    "predicted": {"color": "#b35900", "marker": "D", "markersize": 3.5, "linestyle": "--"},
    "adaptive": {"color": "#1a7f37", "linewidth": 2.5},
    "serial": {"color": "#b3261e", "linestyle": (0, (8, 4))},
    "free": {"color": "#1a7f37", "linestyle": ":"},
}
_PARTS = ("#5b8fd9", "#e0a04a", "#9aa4af")


def write_png(path: str | Path, results: Mapping[str, Any]) -> None:
    """One row of charts per pair, with its paragraph above.

    Raises:
        RequestError: matplotlib is not installed, or nothing was measured.
        CacheError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError(
            "to draw a picture, matplotlib is needed: pip install 'anydraft[report]'"
        ) from None
    found = views(results)
    if not found:
        raise RequestError("there is no finished run in this file, so nothing to draw")
    figure = Figure(figsize=(18, 5.6 * len(found)), layout="constrained")
    rows = figure.subfigures(len(found), 1, squeeze=False)[:, 0]
    for row, view in zip(rows, found, strict=True):
        _row(row, view)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None


def _row(figure: Any, view: View) -> None:
    words = textwrap.fill(paragraph(view), 190)
    title = f"{view.title}: {verdict(view)}".removesuffix(": ")
    figure.suptitle(_plain(f"{title}\n{words}"), fontsize=10, x=0.01, ha="left")
    made = charts(view)
    if not made:
        return
    for axes, chart in zip(figure.subplots(1, len(made), squeeze=False)[0], made, strict=True):
        _draw(axes, chart)


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(_plain(chart.title), fontsize=11)
    axes.set_xlabel(_plain(chart.x_label))
    axes.set_ylabel(_plain(chart.y_label))
    if chart.stacks:
        _stacks(axes, chart)
    else:
        _lines(axes, chart)
    axes.set_ylim(bottom=0, top=chart.top)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, framealpha=0.6)


def _lines(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, label=_plain(line.name), **_STYLES[line.style])
        for x, (low, high) in line.intervals.items():
            axes.plot([x, x], [low, high], color=_STYLES[line.style]["color"], alpha=0.6)
    if chart.reference is not None:
        axes.axhline(chart.reference[0], color="black", linewidth=1, linestyle=":")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _stacks(axes: Any, chart: Chart) -> None:
    labels = list(chart.stacks)
    below = [0.0] * len(labels)
    for number, name in enumerate(chart.parts):
        heights = [chart.stacks[label][number] for label in labels]
        axes.bar(labels, heights, 0.64, bottom=below, label=name, color=_PARTS[number])
        below = [a + b for a, b in zip(below, heights, strict=True)]


def _plain(text: str) -> str:
    """Text in which a dollar sign does not begin a formula."""
    return text.replace("$", r"\$")
