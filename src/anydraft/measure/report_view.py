"""What a report shows of a benchmark: charts and figures as data, before any drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anydraft.measure import bench_stats
from anydraft.measure.bench_plan import AUTO

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        style: "measured", "predicted", "adaptive", "second", "serial" or "free": colour and dashes.
        intervals: x -> (low, high), drawn as bars.
        marks: whether the points are marked.
    """

    name: str
    style: str
    points: list[Point]
    intervals: dict[float, Point] = field(default_factory=dict)
    marks: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines, or bars of stacked parts, over whole numbers.

    Attributes:
        lines: for a line chart.
        stacks: for bars: label below -> the parts, bottom first.
        parts: names of the parts.
        unit: of the stacks' values.
        top: y that the chart ends at; lines are cut there.
        reference: y of a horizontal line, with its name.
        note: what a reader should see in it, one sentence.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    stacks: dict[str, list[float]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    unit: str = "ms"
    top: float | None = None
    reference: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """One pair under one sampling setting, seen whole.

    Attributes:
        entry: the pair's entry in the results.
        cells: those of this view, plain decoding first.
        expected: the prediction for this sampling setting, or {}.
        cost: seconds of a target pass by width; from the probe, else from the runs.
    """

    entry: Mapping[str, Any]
    sampling: str
    cells: Sequence[Mapping[str, Any]]
    expected: Mapping[str, Any]
    cost: Mapping[int, float]

    @property
    def pair(self) -> str:
        return str(self.entry["id"])

    @property
    def title(self) -> str:
        return self.pair if self.sampling == "greedy" else f"{self.pair}, {self.sampling}"

    @property
    def plain(self) -> Mapping[str, Any] | None:
        return next((c for c in self.cells if c["contender"] == "plain"), None)

    def drafted(self, method: str | None = None) -> list[Mapping[str, Any]]:
        """Cells of fixed K with a speed-up, by K."""
        found = [
            c
            for c in self.cells
            if c["contender"] == "draft"
            and c["num_draft_tokens"] != AUTO
            and c["speedup"]
            and (method is None or c["method"] == method)
        ]
        return sorted(found, key=lambda c: int(c["num_draft_tokens"]))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(c["method"] for c in self.drafted()))

    @property
    def adaptive(self) -> Mapping[str, Any] | None:
        return next((c for c in self.cells if c["num_draft_tokens"] == AUTO and c["speedup"]), None)

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The fastest cell of fixed K."""
        return max(self.drafted(), key=_ratio, default=None)

    def predicted(self, cell: Mapping[str, Any]) -> float | None:
        """What was expected of a cell; predictions are of seed-identical verification."""
        if cell["contender"] != "draft" or cell["method"] != "match":
            return None
        found = self.expected.get("speedup", {}).get(str(cell["num_draft_tokens"]))
        return None if found is None else float(found)

    def identity(self) -> dict[str, int]:
        """How many drafted answers were compared with plain decoding's, by verdict."""
        counts: dict[str, int] = {}
        for cell in self.cells:
            if cell["contender"] == "draft":
                for verdict, count in cell["identity"].items():
                    counts[verdict] = counts.get(verdict, 0) + count
        return counts


def _ratio(cell: Mapping[str, Any]) -> float:
    return float(cell["speedup"]["geometric_mean"])


def views(results: Mapping[str, Any]) -> list[View]:
    """All pairs and sampling settings that have at least one finished block."""
    found = []
    cells = bench_stats.summarise(results["runs"])
    for entry in results["pairs"]:
        prediction = entry.get("prediction") or {}
        cost = {int(n): s for n, s in prediction.get("verify_seconds", {}).items()}
        cost = cost or bench_stats.verify_cost(results["runs"], entry["id"])
        for sampling in dict.fromkeys(c["sampling"] for c in cells if c["pair"] == entry["id"]):
            own = [c for c in cells if c["pair"] == entry["id"] and c["sampling"] == sampling]
            own.sort(key=lambda c: c["contender"] != "plain")
            expected = prediction.get("sampling", {}).get(sampling, {})
            found.append(View(entry, sampling, own, expected, cost))
    return found


# --- charts ---------------------------------------------------------------------------------------


def charts(view: View) -> list[Chart]:
    """The charts of a view, those without data left out."""
    made = [_speedups(view), _verify_cost(view), _acceptance(view), _rounds(view), _chosen(view)]
    return [chart for chart in made if chart is not None]


def _speedups(view: View) -> Chart | None:
    lines = []
    for index, method in enumerate(view.methods):
        cells = view.drafted(method)
        points = [(0.0, 1.0)] + [(float(c["num_draft_tokens"]), _ratio(c)) for c in cells]
        intervals = {
            float(c["num_draft_tokens"]): (c["speedup"]["low"], c["speedup"]["high"]) for c in cells
        }
        name = "measured" if len(view.methods) == 1 else f"measured, {method}"
        lines.append(Line(name, "second" if index else "measured", points, intervals))
    if not lines:
        return None
    last = max(x for line in lines for x, _ in line.points)
    expected = {int(k): v for k, v in view.expected.get("speedup", {}).items() if k != AUTO}
    if expected:
        points = [(float(k), float(v)) for k, v in sorted(expected.items()) if k <= last]
        lines.append(Line("predicted", "predicted", points))
    if view.adaptive is not None:
        y = _ratio(view.adaptive)
        lines.append(Line("adaptive", "adaptive", [(0.0, y), (last, y)], marks=False))
    return Chart(
        title="Speed-up against K",
        note="Above 1 the draft pays. Bars are 95 % intervals over prompts; the prediction "
        "was made beforehand, from costs and other prompts.",
        x_label="K, tokens drafted per round",
        y_label="speed, plain decoding = 1",
        lines=lines,
        reference=(1.0, "plain decoding"),
    )


def _verify_cost(view: View) -> Chart | None:
    if len(view.cost) < 2 or 1 not in view.cost:
        return None
    longest = max([int(c["num_draft_tokens"]) for c in view.drafted()], default=8)
    widest = max(n for n in view.cost if n <= max(longest + 1, 9))
    one = view.cost[1]
    points = [(float(n), s / one) for n, s in sorted(view.cost.items()) if n <= widest]
    highest = max(y for _, y in points)
    return Chart(
        title="What verifying costs: v(n)",
        note="A target pass over n tokens, in passes over one. On the serial line, checking n "
        "tokens takes as long as writing them; on the free line it costs nothing extra.",
        x_label="n, tokens in a target pass",
        y_label="time, one token = 1",
        lines=[
            Line("serial", "serial", [(1.0, 1.0), (float(widest), float(widest))], marks=False),
            Line("free", "free", [(1.0, 1.0), (float(widest), 1.0)], marks=False),
            Line("this target", "measured", points),
        ],
        top=max(2.0, min(float(widest), highest * 1.4)),
    )


def _acceptance(view: View) -> Chart | None:
    cells = [c for c in view.drafted("match") or view.drafted() if c["acceptance"]]
    if not cells:
        return None
    deepest = cells[-1]
    positions = range(1, len(deepest["acceptance"]) + 1)
    lines = [
        Line("accepted, if reached", "measured", _numbered(positions, deepest["acceptance"])),
        Line("all so far accepted", "second", _numbered(positions, deepest["survival"])),
    ]
    expected = view.expected.get("acceptance", [])[: len(deepest["acceptance"])]
    if expected:
        lines.append(Line("on other prompts", "predicted", _numbered(positions, expected)))
    return Chart(
        title="Acceptance by position",
        note=f"At K = {deepest['num_draft_tokens']}. The lower line is the chance that a token so "
        "deep in the draft is used at all.",
        x_label="position in the draft",
        y_label="share of tokens",
        lines=lines,
        top=1.0,
    )


def _numbered(positions: Sequence[int], values: Sequence[float]) -> list[Point]:
    return [(float(x), float(y)) for x, y in zip(positions, values, strict=False)]


def _rounds(view: View) -> Chart | None:
    cells = [c for c in [view.plain, *view.drafted("match")] if c and c["round_seconds"]["target"]]
    if not cells:
        return None
    names = ("target", "draft", "overhead")
    return Chart(
        title="Where a round's time goes",
        note="Milliseconds of an average round. A round yields one token at K = 0 and more with a "
        "draft.",
        x_label="K",
        y_label="ms per round",
        stacks={
            str(c["num_draft_tokens"]): [1e3 * (c["round_seconds"][n] or 0.0) for n in names]
            for c in cells
        },
        parts=("target", "draft", "everything else"),
    )


def _chosen(view: View) -> Chart | None:
    """What the adaptive policy did, as a histogram."""
    counts = {} if view.adaptive is None else view.adaptive["passes"]
    total = sum(counts.values())
    if not total:
        return None
    widest = max(int(n) for n in counts)
    shares = {str(n): [100 * counts.get(str(n), 0) / total] for n in range(1, widest + 1)}
    return Chart(
        title="What the adaptive policy chose",
        note="Target passes by the number of tokens in them; 1 is plain decoding. Compare with "
        "v(n): good choices fall on cheap ones.",
        x_label="n, tokens in a target pass",
        y_label="% of passes",
        stacks=shares,
        parts=("adaptive",),
        unit="%",
    )
