"""`anydraft advise`: does a draft pay here, and with how many draft tokens?"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydraft.cli import common, render
from anydraft.errors import RequestError

if TYPE_CHECKING:
    from anydraft.engine import Engine
    from anydraft.measure.advise import Advice, DraftAdvice
    from anydraft.measure.prompts import Prompt
    from anydraft.profile import Profile

_SECONDS, _QUICK_SECONDS = 50.0, 12.5
"""What is aimed at in all: measurements are cut short, down to the least that tells anything."""
_TOKENS, _QUICK_TOKENS = 48, 16
_QUICK_PROMPTS = 5
_PLAIN_SHARE = 0.3  # of what is left once the target is loaded, unless the answers end before
_LOOKUP_SHARE = 0.05  # of what a draft model gets: it has no passes to measure
_FOLLOW_SHARE = 0.45  # of a draft's own time, for following it; the rest is for its costs
_QUICK_WIDTHS = (1, 2, 3, 5, 9)
_QUICK_FOLLOWED = 5
_QUICK_CONTEXT = 48


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("advise")(advise)


def advise(
    target: Annotated[
        str, typer.Option(help="The model whose words come out: name, folder, .gguf or hub id.")
    ],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that would draft for it; may be given repeatedly, then they are ranked. "
            "Lookup, which needs no model, is always looked at."
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Measure on your own text: a prompt per line, or JSON lines with "text" or '
            '"messages".',
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 is greedy.")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and repetitions.")] = False,
    guarantee: Annotated[
        str | None,
        typer.Option(help="As in `anydraft generate`: what sampled answers may be drafted by."),
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="As in `anydraft generate`.")] = None,
    draft_runtime: Annotated[str | None, typer.Option(help="The same for the drafts.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As in `anydraft generate`.")] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="The same for the drafts alone.")] = None,
    device: Annotated[str | None, typer.Option(help="As in `anydraft generate`.")] = None,
    draft_device: Annotated[str | None, typer.Option(help="The same for the drafts alone.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say whether drafting pays here, with which draft and K, and what would change it.

    Measures what passes and drafts cost on this machine and how often each draft is right; the
    speed follows by arithmetic. The costs are kept: `--num-draft-tokens auto` starts from them.
    """
    time_left = _TimeLeft(_QUICK_SECONDS if quick else _SECONDS, time.perf_counter())
    from anydraft.measure.prompts import OWN, read_prompts

    chosen = list(OWN) if prompts is None else read_prompts(Path(prompts))  # before any loading
    if not 0 <= temperature <= 100:
        raise RequestError(f"temperature must be from 0 to 100, not {temperature}")
    if quick and len(chosen) > _QUICK_PROMPTS:
        step = len(chosen) / _QUICK_PROMPTS
        chosen = [chosen[int(i * step)] for i in range(_QUICK_PROMPTS)]
    models = common.ModelOptions(
        target=target,
        runtime=runtime,
        draft_runtime=draft_runtime,
        guarantee=guarantee,
        dtype=dtype,
        draft_dtype=draft_dtype,
        device=device,
        draft_device=draft_device,
        threads=threads,
    )
    names = [name for name in dict.fromkeys(draft or []) if name != "lookup"]
    found = _measure(models, names, chosen, time_left, quick=quick, temperature=temperature)
    seconds = time_left.spent
    if as_json:
        print(json.dumps({**found.to_dict(), "seconds": round(seconds, 1)}, ensure_ascii=False))
    else:
        _show(found, seconds)


@dataclass(frozen=True, slots=True)
class _TimeLeft:
    """Of a number of seconds that began at a reading of the clock."""

    seconds: float
    began: float

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.began

    def share(self, part: float) -> _TimeLeft:
        """A part of what is left, from now on."""
        return _TimeLeft(part * max(0.0, self.seconds - self.spent), time.perf_counter())

    def is_up(self) -> bool:
        return self.spent >= self.seconds


def _measure(
    models: common.ModelOptions,
    names: list[str],
    prompts: list[Prompt],
    time_left: _TimeLeft,
    *,
    quick: bool,
    temperature: float,
) -> Advice:
    from anydraft.measure import advise as logic

    fields: dict[str, Any] = {"temperature": temperature}
    if temperature:
        fields["seed"] = 1
    render.note(f"loading {models.target}")
    base = common.load_engine(models)
    with base:
        render.note("generating plainly")
        answers = logic.plain_answers(
            base,
            prompts,
            _QUICK_TOKENS if quick else _TOKENS,
            time_left.share(_PLAIN_SHARE).is_up,
            **fields,
        )
        drafts: list[DraftAdvice] = []
        weights = [*[1.0] * len(names), _LOOKUP_SHARE if names else 1.0]
        for at, name in enumerate([*names, logic.LOOKUP]):
            render.note(f"measuring {name}")
            mine = time_left.share(weights[at] / sum(weights[at:]))
            engine = common.add_draft(base.target, models, name)
            known = drafts[0].profile if drafts else None
            count = _QUICK_FOLLOWED if quick and name != logic.LOOKUP else None
            following = mine.share(_FOLLOW_SHARE)
            counts = logic.followed(engine, answers, count, following.is_up)
            probing = mine.seconds - mine.spent
            profile = _profile(engine, probing, known, quick=quick, sampled=temperature > 0)
            expected = logic.expect(engine, profile, prompts, answers, counts)
            drafts.append(
                logic.DraftAdvice(name, profile, expected, engine.choice_for(answers[0].sampling))
            )
            if engine.drafter is not None and name != logic.LOOKUP:
                engine.drafter.close()
        ranked = logic.rank(drafts)
        profiles = [d.profile for d in drafts]
        plain = max(d.best.model.tokens_per_second(0) for d in drafts)
        return logic.Advice(base.target.name, ranked, plain, logic.warnings_of(profiles))


def _profile(
    engine: Engine, seconds: float, known: Profile | None, *, quick: bool, sampled: bool
) -> Profile:
    """Measured now, or, if it has to be quick, what is known of exactly these models.

    Args:
        known: of the same target, a moment old.
        sampled: whether what sampled requests cost beyond greedy ones is wanted.
    """
    from anydraft.measure.probe import CONTEXTS, WIDTHS, probe
    from anydraft.profile import load_profile

    if quick:
        kept = load_profile(engine.target, engine.drafter)
        if kept is not None and kept.quiet.ok and (kept.target.logits or not sampled):
            return kept
    return probe(
        engine,
        seconds=seconds,
        widths=_QUICK_WIDTHS if quick else WIDTHS,
        contexts=(_QUICK_CONTEXT,) if quick else CONTEXTS,
        turns=1 if quick else 2,
        sampled=sampled or not quick,
        known=known,
    )


def _show(advice: Advice, seconds: float) -> None:
    from anydraft.measure.advise import changes, verdict

    lines = [verdict(advice)]
    lines += [f"Warning: {warning}" for warning in advice.warnings]
    said = changes(advice)
    if said:
        lines += ["", "What would change it"]
        lines += [f"  {line}" for line in said]
    lines += ["", f"Plain decoding: {advice.plain_tokens_per_second:.1f} tokens/s"]
    for draft in advice.drafts:
        lines += ["", f"{draft.name}, method {draft.choice.method}: {draft.choice.reason}"]
        lines += _table(draft)
    lines += ["", f"measured in {seconds:.0f} s; speed-ups are predictions from these costs"]
    print(render.visible("\n".join(lines)))


def _table(draft: DraftAdvice) -> list[str]:
    lines = []
    for expected in draft.expectations:
        model = expected.model
        acceptance = ", ".join(f"{a:.2f}" for a in list(model.acceptance)[:6]) or "none"
        lines.append(f"{draft.name}, {expected.kind}: acceptance {acceptance}")
        lines.append(
            f"  {'K':>3}{'tokens/round':>14}{'draft ms':>10}{'target ms':>11}{'round ms':>10}"
            f"{'tokens/s':>10}{'speed-up':>10}{'free draft':>12}{'all accepted':>14}"
        )
        for row in model.table(8):
            lines.append(
                f"  {row['num_draft_tokens']:>3}{row['tokens_per_round']:>14.2f}"
                f"{1e3 * row['draft_seconds']:>10.1f}{1e3 * row['verify_seconds']:>11.1f}"
                f"{1e3 * row['round_seconds']:>10.1f}{row['tokens_per_second']:>10.1f}"
                f"{row['speedup']:>10.2f}{row['speedup_free_draft']:>12.2f}"
                f"{row['speedup_all_accepted']:>14.2f}"
            )
    return lines
