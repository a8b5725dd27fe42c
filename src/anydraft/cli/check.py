"""`anydraft check`: can this draft serve this target, and how?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

_NUM_KINDS = 6


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("check")(check)


def check(
    target: Annotated[
        str, typer.Option(help="The model whose words come out: name, folder, .gguf or hub id.")
    ],
    draft: Annotated[str, typer.Option(help="The model that would draft for it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say whether a draft can serve a target, and how.

    Reads tokenizers and configs, no weights. Exits with 1 if only lookup would apply.
    """
    from anydraft.backends import is_self_draft
    from anydraft.cli.common import one_line_warnings
    from anydraft.errors import RequestError

    if draft == "lookup":
        raise RequestError("lookup repeats what the text holds: it fits every target, unchecked")
    if is_self_draft(draft):
        raise RequestError("a copy of the target has the target's vocabulary: there is no question")
    one_line_warnings()
    from anydraft.drafters.proposal_laws import law_reasons
    from anydraft.methods import offered
    from anydraft.vocabulary import compare
    from anydraft.vocabulary_hf import load_vocabulary
    from anydraft.vocabulary_report import report

    target_vocabulary = load_vocabulary(target)
    draft_vocabulary = target_vocabulary if draft == target else load_vocabulary(draft)
    comparison = compare(target_vocabulary, draft_vocabulary)
    result = report(target_vocabulary, draft_vocabulary, comparison)
    result["laws"] = law_reasons(target_vocabulary, draft_vocabulary, comparison)
    result["sampling_methods"] = {str(m): m.label for m in offered(result["laws"])}
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        _show(result)
    methods = result["methods"]
    if not (methods["draft_model"]["applies"] or methods["cross_vocabulary"]["applies"]):
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    from anydraft.cli.render import visible

    lines = _sizes(result)
    for side, other in (("target", "draft"), ("draft", "target")):
        lines += _missing(side, other, result[side])
    pairs = result["roles_matched"].items()
    matched = [f"{role} {pair['target']} = {pair['draft']}" for role, pair in pairs]
    lines += ["", f"Special tokens matched: {', '.join(matched) or 'none'}", "", "Methods"]
    for name, method in result["methods"].items():
        lines.append(f"  {name:<17} {'yes' if method['applies'] else 'no: ' + method['reason']}")
    lines += _sampling(result)
    lines += [""] * bool(result["notes"]) + [f"Note: {note}" for note in result["notes"]]
    lines += ["", f"Advice: {result['advice']}"]
    print(visible("\n".join(lines)))


def _sampling(result: dict[str, Any]) -> list[str]:
    """Methods of sampled answers, the reasons against the others, and what auto does."""
    lines = ["", "Methods of sampled answers (--method)"]
    lines += [f"  {name:<17} {label}" for name, label in result["sampling_methods"].items()]
    lines += [f"  {law + '+…':<17} no: {why}" for law, why in result["laws"].items() if why]
    return lines + [
        "auto is match; with --guarantee distribution it measures the others when the models are",
        "loaded, takes the fastest and says why. Greedy answers always go by match.",
    ]


def _sizes(result: dict[str, Any]) -> list[str]:
    sides = [result["target"], result["draft"]]
    width = max(16, *(len(side["name"]) + 2 for side in sides))
    rows = [("", [side["name"] for side in sides])]
    rows += [
        (label, [f"{side[key]:,}" for side in sides])
        for label, key in (
            ("ids (width of the logits)", "size"),
            ("  ordinary", "ordinary"),
            ("  added, with bytes", "added"),
            ("  control, without", "control"),
            ("  padding, never used", "padding"),
        )
    ]
    rows.append(("also in the other", [f"{100 * side['overlap']:.1f} %" for side in sides]))
    rows.append(
        ("bytes it cannot spell", [str(len(side["missing_bytes"]) or "none") for side in sides])
    )
    rows.append(("rewrites text by", [side["rewrites_text"] or "nothing" for side in sides]))
    header = f"{'':<27}{'target':>{width}}{'draft':>{width}}"
    return [header] + [
        f"{label:<27}" + "".join(f"{v:>{width}}" for v in row) for label, row in rows
    ]


def _missing(side: str, other: str, values: dict[str, Any]) -> list[str]:
    groups = values["not_in_the_other"]
    if not groups:
        return ["", f"Every token of the {side} is one of the {other}."]
    total = sum(group["count"] for group in groups)
    lines = ["", f"Tokens of the {side} that are not one of the {other}: {total:,}"]
    lines += [
        f"  {group['kind']:<21}{group['count']:>8,}   {'  '.join(group['samples'])}"
        for group in groups[:_NUM_KINDS]
    ]
    rest = groups[_NUM_KINDS:]
    if rest:
        names = ", ".join(group["kind"] for group in rest[:8]) + (" …" if len(rest) > 8 else "")
        lines.append(f"  {'others':<21}{sum(g['count'] for g in rest):>8,}   {names}")
    return lines
