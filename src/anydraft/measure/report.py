"""A benchmark's results as one HTML page without references to anything outside, or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from anydraft.measure import report_tables
from anydraft.measure.report_svg import legend, svg
from anydraft.measure.report_tables import Table, verdict
from anydraft.measure.report_view import Chart, View, charts, views
from anydraft.measure.report_words import paragraph, won

TITLE = "anydraft: does drafting help here?"
# Nothing may be fetched, whatever a string in the results contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_CSS = Path(__file__).parent / "report.css"

WORDS = {
    "Speed-up": "Tokens per second after the first round, divided by plain decoding's in the same "
    "block of runs; the geometric mean over prompts, with its 95 % bootstrap interval.",
    "K": "The number of tokens drafted per round; 0 is plain decoding.",
    "Plain decoding": "The same program and target without a draft: one token per target pass.",
    "Round": "One draft and one target pass that checks it. It yields the accepted tokens and one "
    "of the target's own.",
    "Same tokens": "Answers that are token for token plain decoding's. A near-tie is a difference "
    "where rounding decides between two equally likely tokens.",
    "Predicted": "From the costs of passes, measured beforehand, and from how often the draft was "
    "right on prompts that are not in the benchmark.",
}


def html(results: Mapping[str, Any]) -> str:
    """The page; every string of the results is escaped."""
    found = views(results)
    style = _CSS.read_text(encoding="utf-8")
    body = [f"<h1>{escape(TITLE)}</h1>", *_head(results, found)]
    for number, view in enumerate(found):
        body.append(_section(view, f"pair{number}"))
    words = "".join(f"<dt>{escape(w)}</dt><dd>{escape(t)}</dd>" for w, t in WORDS.items())
    body.append(f"<h2>Words</h2><dl>{words}</dl>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(TITLE)}</title>'
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _head(results: Mapping[str, Any], found: Sequence[View]) -> list[str]:
    parts = [f"<p class=soft>{escape(line)}</p>" for line in _about(results)]
    if not results.get("complete"):
        parts.append(f"<p class=warn>{escape(_INCOMPLETE)}</p>")
    if not found:
        return [*parts, f"<p>{_NOTHING}</p>"]
    header, rows = report_tables.overview(found)
    links = [f'<a href="#pair{i}">{escape(row[0])}</a>' for i, row in enumerate(rows)]
    classes = [_CLASS[won(view)] if view.best else "" for view in found]
    return [*parts, _table(header, rows, links, classes)]


_INCOMPLETE = (
    "This benchmark is not finished: figures are of the prompts that were gone through so far."
)
_NOTHING = "There is no finished run in this file."
_VERSIONS = (("PyTorch", "torch"), ("transformers", "transformers"), ("anydraft", "anydraft"))
_CLASS = {True: "won", False: "lost", None: "even"}


def _about(results: Mapping[str, Any]) -> list[str]:
    machine, plan = results["machine"], results["plan"]
    place = ", ".join(
        str(part)
        for part in (
            machine.get("gpu"),
            machine.get("cpu"),
            f"{machine.get('threads')} threads on {machine.get('cores')} cores",
            machine.get("system"),
            *(f"{name} {machine[key]}" for name, key in _VERSIONS if machine.get(key)),
        )
        if part
    )
    kinds = list(dict.fromkeys(p["kind"].replace("_", " ") for p in results["prompts"]))
    work = (
        f"{_plural(len(results['prompts']), 'prompt')} ({', '.join(kinds)}), up to "
        f"{_plural(plan.get('max_tokens', 0), 'token')} per answer, gone through "
        f"{_times(plan.get('repeats', 1))} by all contenders in turn; "
        f"{str(results.get('created', ''))[:10]}."
    )
    return [f"Measured on {place}.", work]


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _section(view: View, name: str) -> str:
    badge = ""
    if view.best is not None:
        badge = f' <span class="badge {_CLASS[won(view)]}">{escape(verdict(view))}</span>'
    parts = [f'<section><h2 id="{name}">{escape(view.title)}{badge}</h2>']
    if view.entry.get("note"):
        parts.append(f"<p class=warn>{escape(str(view.entry['note']))}</p>")
    parts.append(f"<p>{escape(paragraph(view))}</p>")
    parts.append(f"<p class=soft>{escape(_models(view.entry))}</p>")
    figures = "".join(_figure(chart) for chart in charts(view))
    parts.append(f"<div class=charts>{figures}</div>")
    parts.append(_table(*report_tables.cells(view)))
    by_kind = report_tables.kinds(view)
    if by_kind is not None:
        parts.append(
            f"<details open><summary>Speed-up by kind of text</summary>{_table(*by_kind)}</details>"
        )
    return "".join(parts) + "</section>"


def _models(entry: Mapping[str, Any]) -> str:
    """Target and draft with how they ran, and the memory that both took."""
    sides = []
    for role in ("target", "draft"):
        model = entry.get(role)
        if model:
            how = [str(model[key]) for key in ("runtime", "dtype") if model.get(key)]
            sides.append(f"{role}: {model['name']}" + (f" ({', '.join(how)})" if how else ""))
    memory = entry.get("memory") or {}
    if memory.get("running"):
        sides.append(f"memory of the process while running: {memory['running'] / 1e9:.1f} GB")
    text = "; ".join(sides)
    return f"{text[:1].upper()}{text[1:]}."


def _figure(chart: Chart) -> str:
    keys = "".join(f"<li>{drawing}{escape(name)}</li>" for name, drawing in legend(chart))
    return (
        f"<figure><h3>{escape(chart.title)}</h3><ul class=legend>{keys}</ul>{svg(chart)}"
        f"<figcaption>{escape(chart.note)}</figcaption></figure>"
    )


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    first: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> str:
    """A table; `first` replaces the first column by markup, `classes` colour the second."""
    left = [" class=text" if classes and i == 1 else "" for i in range(len(header))]
    heads = "".join(f"<th{c}>{escape(h)}</th>" for c, h in zip(left, header, strict=True))
    lines = [f"<tr>{heads}</tr>"]
    for number, row in enumerate(rows):
        cells = [escape(cell) for cell in row]
        if first:
            cells[0] = first[number]
        marks = ["" for _ in cells]
        if classes and classes[number]:
            marks[1] = f' class="badge {classes[number]}"'
        lines.append(
            "<tr>"
            + "".join(f"<td{m}>{c}</td>" for m, c in zip(marks, cells, strict=True))
            + "</tr>"
        )
    return f"<div class=table><table>{''.join(lines)}</table></div>"


# --- Markdown -------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Any]) -> str:
    """The same words and tables as text; of the charts, the figures."""
    found = views(results)
    parts = [f"# {TITLE}", *(_md(line) for line in _about(results))]
    if not results.get("complete"):
        parts.append(f"**{_INCOMPLETE}**")
    parts.append(
        _md_table(*report_tables.overview(found)) if found else "There is no finished run."
    )
    for view in found:
        parts.append(f"## {_md(view.title)}: {verdict(view)}".removesuffix(": "))
        if view.entry.get("note"):
            parts.append(f"**{_md(str(view.entry['note']))}**")
        parts += [_md(paragraph(view)), _md(_models(view.entry))]
        parts.append(_md_table(*report_tables.cells(view)))
        if (by_kind := report_tables.kinds(view)) is not None:
            parts += ["Speed-up by kind of text:", _md_table(*by_kind)]
        parts += [_md_chart(chart) for chart in charts(view)[1:]]
    parts += ["## Words", "\n".join(f"- **{word}**: {text}" for word, text in WORDS.items())]
    return "\n\n".join(parts) + "\n"


def _md_chart(chart: Chart) -> str:
    if chart.stacks:
        table: Table = (
            [chart.x_label, *chart.parts],
            [[k, *(f"{v:.1f}" for v in stack)] for k, stack in chart.stacks.items()],
        )
    else:
        lines = [line for line in chart.lines if line.style not in ("serial", "free")]
        xs = sorted({x for line in lines for x, _ in line.points})
        rows = [
            [line.name, *(f"{at[x]:.2f}" if x in at else "" for x in xs)]
            for line in lines
            for at in [dict(line.points)]
        ]
        table = ([chart.x_label, *(f"{x:g}" for x in xs)], rows)
    return f"{chart.title}. {chart.note}\n\n{_md_table(*table)}"


def _md_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_md(cell) for cell in header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(_md(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _md(text: str) -> str:
    """Text that means itself in Markdown, also where HTML is let through."""
    for sign in "\\|*_`[]":
        text = text.replace(sign, "\\" + sign)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
