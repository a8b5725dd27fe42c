"""Charts as inline SVG: no script, no font, no image; colours come from the page's style sheet.

Lines differ by dashes and marks as well as by colour, so that they also do on paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from anydraft.measure.report_view import Chart, Line

WIDTH, HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 14, 46
_MARKS = {"measured": "circle", "second": "square", "predicted": "diamond"}


def svg(chart: Chart) -> str:
    """The drawing alone, described for those who cannot see it."""
    body = _bars(chart) if chart.stacks else _lines(chart)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_described(chart))}">'
        f"{body}</svg>"
    )


def legend(chart: Chart) -> list[tuple[str, str]]:
    """(name, drawing of its line or colour), in the order in which they are drawn."""
    if chart.stacks:
        swatches = enumerate(chart.parts)
        return [
            (name, f'<svg viewBox="0 0 26 10" class="key" aria-hidden="true">'
                   f'<rect x="6" y="0" width="12" height="10" class="part{i}"/></svg>')
            for i, name in swatches
        ]  # fmt: skip
    return [
        (line.name, f'<svg viewBox="0 0 26 10" class="key" aria-hidden="true">'
                    f'<path d="M1 5H25" class="line {line.style}"/>'
                    f"{_mark(13, 5, line) if line.marks else ''}</svg>")
        for line in chart.lines
    ]  # fmt: skip


def _described(chart: Chart) -> str:
    """The chart's figures as a sentence."""
    if chart.stacks:
        rows = [
            f"{label}: " + ", ".join(f"{n} {v:.1f}" for n, v in zip(chart.parts, s, strict=True))
            for label, s in chart.stacks.items()
        ]
    else:
        rows = [
            f"{line.name}: " + ", ".join(f"{y:.2f} at {x:g}" for x, y in line.points)
            for line in chart.lines
        ]
    return f"{chart.title}. {chart.y_label} over {chart.x_label}. " + "; ".join(rows)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to at least `high`."""
    raw = (high - low) / most or 1.0
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    count = math.ceil((high - low) / step - 1e-9)
    return [low + i * step for i in range(count + 1)]


class _Frame:
    """From figures to places on the drawing."""

    def __init__(self, x_low: float, x_high: float, y_marks: Sequence[float]) -> None:
        self.x_low, self.x_high = x_low, x_high if x_high > x_low else x_low + 1
        self.y_marks = y_marks
        self.y_low, self.y_high = y_marks[0], y_marks[-1]

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def axes(self, chart: Chart, labels: Sequence[tuple[float, str]]) -> str:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for mark in self.y_marks:
            y = self.y(mark)
            parts.append(f'<path d="M{_LEFT} {y}H{right}" class="grid"/>')
            parts.append(f'<text x="{_LEFT - 7}" y="{y + 4}" class="end">{mark:g}</text>')
        for value, label in labels:
            x = self.x(value)
            parts.append(f'<text x="{x}" y="{bottom + 17}" class="mid">{escape(label)}</text>')
        parts.append(f'<path d="M{_LEFT} {bottom}H{right}" class="axis"/>')
        middle = (_LEFT + right) / 2
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 8}" class="mid label">{escape(chart.x_label)}</text>'
        )
        across = (_TOP + bottom) / 2
        parts.append(
            f'<text transform="translate(13 {across}) rotate(-90)" class="mid label">'
            f"{escape(chart.y_label)}</text>"
        )
        return "".join(parts)


def _lines(chart: Chart) -> str:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [y for line in chart.lines for pair in line.intervals.values() for y in pair]
    high = chart.top if chart.top is not None else max(ys) * 1.05
    frame = _Frame(min(xs), max(xs), ticks(0.0, high, 5))
    step = max(1, math.ceil((max(xs) - min(xs)) / 9))
    labels = [(float(x), str(x)) for x in range(int(min(xs)), int(max(xs)) + 1, step)]
    parts = [frame.axes(chart, labels)]
    if chart.reference is not None:
        y = frame.y(chart.reference[0])
        parts.append(f'<path d="M{_LEFT} {y}H{WIDTH - _RIGHT}" class="reference"/>')
        parts.append(
            f'<text x="{WIDTH - _RIGHT}" y="{y - 5}" class="end small">'
            f"{escape(chart.reference[1])}</text>"
        )
    return "".join(parts) + "".join(_line(frame, line) for line in chart.lines)


def _line(frame: _Frame, line: Line) -> str:
    points = _cut(line.points, frame.y_high)
    path = "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in points)
    parts = [f'<path d="M{path}" class="line {line.style}"/>']
    for x, (low, high) in line.intervals.items():
        top, bottom = frame.y(min(high, frame.y_high)), frame.y(low)
        parts.append(f'<path d="M{frame.x(x)} {top}V{bottom}" class="interval {line.style}"/>')
    if line.marks:
        for x, y in points:
            title = f"<title>{escape(line.name)}: {y:.2f} at {x:g}</title>"
            parts.append(f"<g>{title}{_mark(frame.x(x), frame.y(y), line)}</g>")
    return "".join(parts)


def _cut(points: Sequence[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """The line up to where it leaves the chart."""
    kept: list[tuple[float, float]] = []
    for x, y in points:
        if y > top:
            if kept:
                x0, y0 = kept[-1]
                kept.append((x0 + (x - x0) * (top - y0) / (y - y0), top))
            break
        kept.append((x, y))
    return kept or [(points[0][0], top)]


def _mark(x: float, y: float, line: Line) -> str:
    kind = _MARKS.get(line.style, "circle")
    if kind == "circle":
        return f'<circle cx="{x}" cy="{y}" r="3.5" class="mark {line.style}"/>'
    turn = f' transform="rotate(45 {x} {y})"' if kind == "diamond" else ""
    return f'<rect x="{x - 3}" y="{y - 3}" width="6" height="6"{turn} class="mark {line.style}"/>'


def _bars(chart: Chart) -> str:
    high = max(sum(stack) for stack in chart.stacks.values()) * 1.05
    count = len(chart.stacks)
    frame = _Frame(-0.6, count - 0.4, ticks(0.0, high, 5))
    every = math.ceil(count / 12)
    labels = [(float(i), label) for i, label in enumerate(chart.stacks) if i % every == 0]
    parts = [frame.axes(chart, labels)]
    half = min(0.32, 0.1 * count)
    for index, (label, stack) in enumerate(chart.stacks.items()):
        left, width = frame.x(index - half), frame.x(index + half) - frame.x(index - half)
        below = 0.0
        for number, (name, value) in enumerate(zip(chart.parts, stack, strict=True)):
            top, bottom = frame.y(below + value), frame.y(below)
            below += value
            parts.append(
                f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{bottom - top:.1f}" '
                f'class="part{number}"><title>{escape(chart.x_label)} = {escape(label)}: '
                f"{escape(name)} {value:.1f} {escape(chart.unit)}</title></rect>"
            )
    return "".join(parts)
