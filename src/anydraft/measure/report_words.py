"""One paragraph per pair: whether the draft paid, and why, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anydraft.measure.advise import why_not
from anydraft.measure.report_view import View
from anydraft.speed import Curve, SpeedModel

MARGIN = 0.03
"""Speed-ups so close to 1 are neither."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a pair won or lost.

    Attributes:
        name: "draft too slow", "acceptance too low", "verification serial", or "" where it won.
        text: the same as a sentence or two, with figures.
    """

    name: str
    text: str


def paragraph(view: View) -> str:
    """The verdict on a view, why, whether it was foreseen, and whether it said the same."""
    best = view.best
    if best is None:
        return _without_draft(view)
    parts = [_verdict(view, best), reason(view, best).text]
    if view.adaptive is not None:
        parts.append(_of_adaptive(view, view.adaptive))
    predicted = view.predicted(best)
    if predicted is not None:
        off = predicted / _mean(best) - 1
        parts.append(
            f"The prediction for K = {best['num_draft_tokens']}, made before from costs and other "
            f"prompts, was {predicted:.2f}, {_off(off)}."
        )
    parts.append(_same(view))
    if not (view.entry.get("prediction") or {}).get("quiet", True):
        parts.append(f"The machine was not quiet: {view.entry['prediction']['not_quiet']}.")
    return " ".join(part for part in parts if part)


def _of_adaptive(view: View, adaptive: Mapping[str, Any]) -> str:
    """Where the draft is a model, copying is among its means, too, so it may beat every K."""
    means = "" if _draft_name(view) == "lookup" else \
        ", which drafts only where that pays, and also copies where the text repeats,"  # fmt: skip
    return f"The adaptive policy{means} came to {_times(adaptive)} the speed of plain decoding."


def _draft_name(view: View) -> str:
    return str((view.entry.get("draft") or {}).get("name", "the draft"))


def _without_draft(view: View) -> str:
    plain = view.plain
    if plain is None or plain["tokens_per_second"] is None:
        return "No answer was long enough to say how fast it was."
    return f"Plain decoding ran at {plain['tokens_per_second']:.1f} tokens per second."


def _mean(cell: Mapping[str, Any]) -> float:
    return float(cell["speedup"]["geometric_mean"])


def _times(cell: Mapping[str, Any]) -> str:
    found = cell["speedup"]
    return f"{_mean(cell):.2f} times (95 % interval {found['low']:.2f} to {found['high']:.2f})"


def _off(off: float) -> str:
    if abs(off) < 0.005:
        return "which is what was measured"
    return f"{abs(off):.0%} too {'high' if off > 0 else 'low'}"


def won(view: View) -> bool | None:
    """Whether the best K is faster than plain decoding; None: too close to say."""
    best = view.best
    if best is None or abs(_mean(best) - 1) < MARGIN:
        return None
    return _mean(best) > 1


def _verdict(view: View, best: Mapping[str, Any]) -> str:
    draft = _draft_name(view)
    at, speed = f"K = {best['num_draft_tokens']}", _times(best)
    result = won(view)
    if result:
        return f"It pays: drafting with {draft} at {at}, answers came at {speed} the speed of " \
            "plain decoding."  # fmt: skip
    if result is None:
        return f"It hardly matters: at its best, {at}, drafting with {draft} ran at {speed} the " \
            "speed of plain decoding."  # fmt: skip
    return f"It does not pay: even at its best, {at}, drafting with {draft} ran at only {speed} " \
        "the speed of plain decoding."  # fmt: skip


def reason(view: View, best: Mapping[str, Any]) -> Reason:
    """Which of the three conditions held or failed: right often, drafted fast, checked cheaply."""
    right, draft, row = _figures(view, best)
    said = []
    if right is not None:
        said.append(f"the draft's first token was right {right:.0%} of the time")
    if draft is not None:
        said.append(f"drafting a token took {draft:.0%} of a plain step")
    if row is not None:
        said.append(f"each further token in a target pass cost {row:.0%} of one")
    facts = _listed(said)
    facts = f"{facts[:1].upper()}{facts[1:]}." if facts else ""
    if won(view) or right is None or draft is None or row is None:
        return Reason("", facts)
    model = _model(view, best)
    name = why_not(model)
    needed = model.break_even()
    if name == "verification serial":
        why = (
            "The reason is the target: it checks drafted tokens nearly one after another, so "
            "what the draft gains is spent again on checking"
        )
    elif name == "draft too slow":
        why = "The reason is the draft's speed, beside the target's: "
        if needed is None:
            why += "even if it were always right, drafting and checking would take too long"
        else:
            why += f"to break even it would have to be right {needed:.0%} of the time"
    else:
        why = "The reason is how rarely the draft is right, for what it costs"
        if needed is not None:
            why += f": to break even it would have to be right {needed:.0%} of the time"
    return Reason(name, f"{why}. {facts}")


def _model(view: View, best: Mapping[str, Any]) -> SpeedModel:
    """The arithmetic of a pair: its costs, and the acceptance that was measured."""
    known = (view.entry.get("prediction") or {}).get("draft_seconds")
    draft = {int(k): float(s) for k, s in known.items()} if known else {}
    if not draft:
        cells = view.drafted("match") or [best]
        draft = {int(c["num_draft_tokens"]): float(c["round_seconds"]["draft"]) for c in cells}
    deepest = max(view.drafted("match"), key=lambda c: len(c["acceptance"]), default=best)
    return SpeedModel(
        acceptance=deepest["acceptance"], verify=Curve(dict(view.cost)), draft=Curve(draft)
    )


def _figures(
    view: View, best: Mapping[str, Any]
) -> tuple[float | None, float | None, float | None]:
    """First acceptance; cost of a drafted token and of an extra row, in plain steps."""
    acceptance = best["acceptance"]
    length = int(best["num_draft_tokens"])
    one = view.cost.get(1)
    draft = best["round_seconds"]["draft"]
    row = None
    if one and (wider := [n for n in view.cost if 1 < n <= max(length + 1, 2)]):
        width = max(wider)
        row = max(0.0, (view.cost[width] / one - 1) / (width - 1))
    return (
        acceptance[0] if acceptance else None,
        draft / length / one if one and draft is not None else None,
        row,
    )


def _listed(parts: list[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"


def _same(view: View) -> str:
    counts = view.identity()
    compared = sum(n for verdict, n in counts.items() if verdict != "not compared")
    if not compared:
        return ""
    if counts.get("violation"):
        return (
            f"Of {compared} drafted answers {counts['violation']} differ from plain decoding's by "
            "more than rounding explains: this is a bug."
        )
    if ties := counts.get("near-tie", 0):
        return (
            f"Of {compared} drafted answers {compared - ties} are token for token those of plain "
            f"decoding; {ties} differ where rounding decides between two equally likely tokens."
        )
    return f"All {compared} drafted answers are token for token those of plain decoding."
