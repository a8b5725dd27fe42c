"""Part one of the laboratory: drafted output is plain output, token for token, and how nearly not.

Every text is decoded plainly, then with the user's draft, then with a draft that knows the text and
goes astray now and then; each time with books on the target's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anydraft.engine import Engine, Generation, GenerationRequest
from anydraft.identity import TeacherForced, compare_with_plain, teacher_force
from anydraft.measure.faults import IDENTITY, ROLLBACK, Fault, from_error
from anydraft.measure.ledger import WaywardDrafter, ledger_of

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=1 penalties min-p 0.02": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_p": 0.02,
    },
}
WAYWARD = "wayward"
WAYWARD_K = 8


@dataclass(slots=True)
class SameTokens:
    """What was compared, and what was found.

    Attributes:
        compared: drafted generations compared with a plain one.
        tokens: emitted tokens in them.
        identical: how many had the same tokens; the rest are near-ties or faults.
        draft_n, draft_n_accepted: what the user's draft proposed, and what stood of it.
        forced: texts put through the plain path token by token.
        ended_early: time was up before everything was compared.
    """

    compared: int = 0
    tokens: int = 0
    identical: int = 0
    near_ties: int = 0
    passes: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    settings: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    forced: list[TeacherForced] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ended_early: bool = False


def check_same_tokens(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[str],
    counts: Sequence[int],
    *,
    max_tokens: int,
    num_forced: int,
    seed: int = 0,
    time_is_up: Callable[[], bool] = lambda: False,
) -> SameTokens:
    """Compare drafted with plain decoding under `match`.

    Args:
        engine: target and draft, or no draft.
        prompts: token ids.
        settings: names from SETTINGS; all of them for every prompt.
        counts: numbers of draft tokens to try the user's draft with.
        num_forced: how many texts are teacher-forced.
        time_is_up: asked before each text but the first.
    """
    found = SameTokens(settings=list(settings), counts=list(counts))
    work = [(p, s) for p in prompts for s in settings]
    for number, (prompt, setting) in enumerate(work):
        if number and time_is_up():
            found.ended_early = True
            break
        request = GenerationRequest(
            prompt=list(prompt), max_tokens=max_tokens, seed=seed + number, **SETTINGS[setting]
        )
        drafted = _check_text(found, engine, request, setting, counts, time_is_up)
        if drafted is not None and len(found.forced) < num_forced:
            _force(found, engine, request, drafted)
    return found


def _check_text(
    found: SameTokens,
    engine: Engine,
    request: GenerationRequest,
    setting: str,
    counts: Sequence[int],
    time_is_up: Callable[[], bool],
) -> Generation | None:
    """One request, plainly and with every draft; returns the first drafted answer."""
    plain = _generate(Engine(engine.target), request, 0)
    ledger = ledger_of(engine.target)
    first: Generation | None = None
    for mode, drafter, count in _drafts(engine, request, plain, counts):
        if found.compared >= 2 and time_is_up():
            found.ended_early = True
            break
        ledger.start()
        where = f"{setting}, K = {count}"
        try:
            got = _generate(Engine(ledger, drafter, count, method="match"), request, count)
            first = first or got
            found.compared += 1
            found.tokens += len(got.token_ids)
            found.passes += len(ledger.passes)
            if mode != WAYWARD:
                found.draft_n += got.stats.draft_n
                found.draft_n_accepted += got.stats.draft_n_accepted
            if got.stats.draft_error is not None:
                raise RuntimeError(f"the draft gave up: {got.stats.draft_error}")
            for line in ledger.audit(engine.encode(request), got.token_ids)[:1]:
                found.faults.append(Fault(ROLLBACK, mode, f"{where}: {line}"))
            report = compare_with_plain(engine, got, request, plain)
        except Exception as error:  # whatever goes wrong where plain decoding does not
            found.faults.append(from_error(error, mode, f"generating with {where}"))
            continue
        found.identical += report.identical
        found.near_ties += len(report.near_ties)
        if not report.passed:
            words = f"{where}: token {report.first_difference} of the output is another one"
            found.faults.append(Fault(IDENTITY, mode, words))
    return first


def _drafts(
    engine: Engine, request: GenerationRequest, plain: Generation, counts: Sequence[int]
) -> Iterator[tuple[str, Any, int]]:
    """(name of the mode, drafter, number of draft tokens)."""
    if engine.drafter is not None:
        for count in counts:
            yield "match", engine.drafter, count
    answer = [*engine.encode(request), *plain.token_ids]
    yield WAYWARD, WaywardDrafter(answer), WAYWARD_K


def _generate(engine: Engine, request: GenerationRequest, count: int) -> Generation:
    from dataclasses import fields

    values = {f.name: getattr(request, f.name) for f in fields(request)}
    values["num_draft_tokens"] = count
    generation: Generation = engine.generate(values.pop("prompt"), **values)
    return generation


def _force(
    found: SameTokens, engine: Engine, request: GenerationRequest, drafted: Generation
) -> None:
    """Teacher-force a drafted text, whether or not it differed."""
    if not drafted.token_ids:
        return
    try:
        report = teacher_force(engine, drafted, request)
    except Exception as error:
        found.faults.append(from_error(error, "match", "teacher-forcing a text"))
        return
    found.forced.append(report)
    for difference in report.violations[:1]:
        words = (
            f"teacher-forced, token {difference.position} is another one by more than rounding "
            f"({difference.bound:.1e})"
        )
        found.faults.append(Fault(IDENTITY, "match", words))
