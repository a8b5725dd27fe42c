"""`anydraft verify`: is drafting with this pair lossless on this machine?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from anydraft.cli import common, render

if TYPE_CHECKING:
    from anydraft.measure.lossless import LosslessReport


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("verify")(verify)


@common.with_options(models=common.ModelOptions)
def verify(
    models: common.ModelOptions,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute's worth instead of ten.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all draws; the same seed runs the same.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say whether drafting changes what a target says, and how surely that is known.

    Compares drafted with plain output token by token, sampled tokens with the target's exact law,
    and states after rollbacks with fresh passes. Exits with 1 on a violation.
    """
    with common.load_engine(models) as engine:
        from anydraft.measure.lossless import FULL, QUICK, report_fields
        from anydraft.measure.lossless import verify as run

        report = run(engine, QUICK if quick else FULL, seed=seed, say=render.note)
        if as_json:
            print(json.dumps(report_fields(report), ensure_ascii=False))
        else:
            print(render.visible("\n".join(lines(report))))
    raise typer.Exit(0 if report.passed else 1)


def lines(report: LosslessReport) -> list[str]:
    """The verdict in the first line, then the table."""
    found = [report.verdict, ""]
    found += [f"  {line}" for line in report.diagnosis] + [""] * bool(report.diagnosis)
    rows = [*_identity(report), *_forced(report), *_states(report)]
    width = max(len(name) for name, _ in rows)
    found += [f"{name:<{width}}  {words}" for name, words in rows]
    found += ["", *_laws(report)]
    if report.not_offered:
        found += ["", "not offered for this pair"]
        found += [f"  {law}: {why}" for law, why in report.not_offered.items()]
    parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in report.seconds.items())
    return [*found, "", f"{report.effort} run: {parts}"]


def _identity(report: LosslessReport) -> list[tuple[str, str]]:
    same = report.same
    early = "; time was up before all were run" if same.ended_early else ""
    rows = [
        (
            "same tokens as plain decoding",
            f"{same.identical} of {same.compared} generations, {same.tokens} tokens, "
            f"{same.near_ties} near-tie(s){early}",
        ),
        ("  settings", ", ".join(same.settings)),
    ]
    if same.counts:
        counts = ", ".join(map(str, same.counts))
        rows.append(
            (
                "  the draft, K = " + counts,
                f"{same.draft_n_accepted} of {same.draft_n} drafted tokens accepted",
            )
        )
    rows.append(("  a draft that errs, K = 8", "every number of accepted tokens occurs"))
    return rows


def _forced(report: LosslessReport) -> list[tuple[str, str]]:
    forced = report.same.forced
    rounding = max((f.bound / 2 for f in forced), default=0.0)
    ties = sum(len(f.near_ties) for f in forced)
    wrong = sum(len(f.violations) for f in forced)
    differ = f"differ by at most {rounding:.1e}" if rounding else "have the same bits"
    return [
        (
            "teacher-forced",
            f"{sum(f.tokens for f in forced)} tokens of {len(forced)} text(s): {ties} near-tie(s), "
            f"{wrong} violation(s)",
        ),
        ("  rounding", f"logits of passes over one and over several tokens {differ}"),
    ]


def _states(report: LosslessReport) -> list[tuple[str, str]]:
    states = report.states
    allowed = f"at most {states.bound:.1e} is rounding" if states.bound else "the same bits wanted"
    return [
        (
            "states after rollbacks",
            f"{states.histories} histories, {states.rollbacks} rollbacks, up to {states.longest} "
            f"tokens; {len(states.faults)} fault(s)",
        ),
        (
            "  logits against fresh passes",
            f"{states.rows} rows, largest difference {states.worst:.1e} ({allowed})",
        ),
    ]


def _laws(report: LosslessReport) -> list[str]:
    """One line per mode."""
    from anydraft.measure.faults import FIRST, PAIR
    from anydraft.measure.gtest import pool

    width = max(len(mode) for mode in report.laws)
    head = f"{'sampled against the exact law':<{width}}"
    width = max(width, len(head))
    found = [
        f"{head}  {'draws':>7}  {'accepted':>8}  {'first: p':>8}  {'sees':>5}  "
        f"{'pair: p':>8}  {'sees':>5}"
    ]
    for mode, result in report.laws.items():
        cells = [f"{mode:<{width}}", f"{pool(result.first).draws:>7}"]
        share = f"{result.accepted / result.drafted:.2f}" if result.drafted else "-"
        cells.append(f"{share:>8}")
        for kind in (FIRST, PAIR):
            tests = result.of_kind(kind)
            p = f"{pool(tests).p_value:.3f}" if tests else "-"
            sees = f"{result.detectable(kind, report.alpha):.3f}" if tests else "-"
            cells += [f"{p:>8}", f"{sees:>5}"]
        found.append("  ".join(cells))
    found.append(
        f"{report.law_prefixes} prefixes; 'sees' is the total variation found with probability 0.8 "
        f"at level {report.alpha:.4f}; all modes pooled see {report.detectable(FIRST):.3f} and "
        f"{report.detectable(PAIR):.3f} at 0.05"
    )
    if report.confirmed:
        found.append(f"repeated with fresh draws, twice as many: {', '.join(report.confirmed)}")
    return found
