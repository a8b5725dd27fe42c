"""Is a pair lossless here? Four checks on anybody's models, and a verdict.

(a) Greedy and seeded output is plain output, token for token. (b) Sampled tokens follow the
target's exact law. (c) Where tokens could differ by rounding, by how little. (d) States are what
fresh passes would be after any history. What each says and does not say: docs/lossless.md.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from anydraft.engine import Engine
from anydraft.errors import AnydraftError, VocabularyError
from anydraft.measure.faults import FIRST, PAIR, ROLLBACK, Fault, diagnosis
from anydraft.measure.gtest import detectable_variation, pool
from anydraft.measure.lab_prompts import PROMPTS
from anydraft.measure.law_tests import SCREEN, LawLab, LawPlan, ModeLaw, law_faults, suspects
from anydraft.measure.replay import Replay
from anydraft.measure.same_tokens import SETTINGS, SameTokens, check_same_tokens
from anydraft.measure.states import TAIL, StateReport, check_states
from anydraft.methods import MATCH, offered
from anydraft.model import LanguageModel
from anydraft.vocabulary import Vocabulary

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run. The shares are seconds after which a part ends early, and says so; what is
    running then is finished first.

    Attributes:
        prompts, settings, counts, max_tokens: of the identity check; counts are those of draft
            tokens.
        forced: texts put through the plain path token by token.
        laws: draws per mode.
        histories: of states; long_history adds one that goes beyond sliding windows.
    """

    name: str
    prompts: int
    settings: tuple[str, ...]
    counts: tuple[int, ...]
    max_tokens: int
    forced: int
    laws: LawPlan
    histories: int
    long_history: bool
    identity_seconds: float
    law_seconds: float
    state_seconds: float


_ALL = tuple(SETTINGS)
QUICK = Effort(
    "quick", 3, (_ALL[0], _ALL[3]), (4,), 20, 1, LawPlan(3, (96, 48, 96), 1), 2, False, 10, 14, 5
)
FULL = Effort(
    "full", 12, _ALL, (1, 4), 32, 6, LawPlan(12, (576, 288, 432), 4), 6, True, 120, 300, 40
)
LONG = 640
"""Tokens of the long history."""


@dataclass(slots=True)
class LosslessReport:
    """What was run and found.

    Attributes:
        target, draft: names; draft is None for a target alone.
        modes: the distribution-identical modes that apply, and "plain".
        not_offered: law -> why the pair does not have it.
        confirmed: modes whose first result was suspicious; their figures are those of the
            repetition.
    """

    target: str
    draft: str | None
    effort: str
    same: SameTokens
    laws: dict[str, ModeLaw]
    states: StateReport
    faults: list[Fault]
    not_offered: dict[str, str]
    confirmed: tuple[str, ...] = ()
    law_prefixes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def alpha(self) -> float:
        """Level of one pooled test, all of them together being screened at SCREEN."""
        tests = sum(bool(r.of_kind(kind)) for r in self.laws.values() for kind in (FIRST, PAIR))
        return SCREEN / 2 / max(1, tests)

    def detectable(self, kind: str) -> float:
        """Smallest total variation that all sampling modes pooled surely show at 5 %."""
        tests = [t for mode, r in self.laws.items() if mode != PLAIN for t in r.of_kind(kind)]
        tests = tests or [t for r in self.laws.values() for t in r.of_kind(kind)]
        pooled = pool(tests)
        return detectable_variation(pooled.draws, pooled.df)

    @property
    def verdict(self) -> str:
        """One line."""
        pair = f"{self.target} with {self.draft}" if self.draft else self.target
        if self.passed:
            ties = self.same.near_ties + sum(len(f.near_ties) for f in self.same.forced)
            rest = f", {ties} near-tie(s)" if ties else ""
            modes = len(self.laws)
            return f"LOSSLESS: {pair}: no violation in match and {modes} sampled mode(s){rest}"
        kinds = [line.split(":")[0] for line in self.diagnosis]
        return f"VIOLATION: {pair}: {'; '.join(kinds)}"

    @property
    def diagnosis(self) -> list[str]:
        """What kind of fault it looks like; nothing if there is none."""
        return diagnosis(self.faults)


def verify(
    engine: Engine,
    effort: Effort = FULL,
    *,
    seed: int = 0,
    modes: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> LosslessReport:
    """Run all four checks.

    Args:
        engine: a target, with a draft or alone.
        seed: of everything that is drawn; the same seed runs the same checks.
        modes: which sampled modes to draw by, PLAIN among them; None: the engine's method if it was
            given one, only PLAIN under the guarantee "seed", else all that the pair has.
        say: told in a line what is being done.
    """
    vocabulary = engine.vocabulary
    if modes is None and engine.guarantee == "seed":
        modes = [PLAIN]
    if modes is None and engine.fixed_method is not None:
        modes = [PLAIN, str(engine.fixed_method)]
    prompts = prefixes(vocabulary, max(effort.prompts, effort.laws.prefixes), seed)
    if engine.target.max_length is not None:
        prompts = [ids[: max(2, engine.target.max_length // 2)] for ids in prompts]
    limits = _Limits(clock)
    say("states: random histories against fresh passes")
    limits.start("states", effort.state_seconds)
    states = check_states(engine.target, _texts(engine, prompts, effort), seed, limits.is_up)
    say(f"identity: {effort.prompts} texts, {len(effort.settings)} settings")
    limits.start("identity", effort.identity_seconds)
    same = check_same_tokens(
        engine,
        prompts[: effort.prompts],
        effort.settings,
        effort.counts if engine.drafter is not None else (),
        max_tokens=effort.max_tokens,
        num_forced=effort.forced,
        seed=seed,
        time_is_up=limits.is_up,
    )
    limits.start("laws", effort.law_seconds)
    laws, confirmed, done = _laws(engine, prompts, effort.laws, seed, modes, say, limits)
    limits.stop()
    faults = [Fault(ROLLBACK, "", line) for line in states.faults]
    faults += same.faults + law_faults(laws)
    return LosslessReport(
        target=engine.target.name,
        draft=None if engine.drafter is None else engine.drafter.name,
        effort=effort.name,
        same=same,
        laws=laws,
        states=states,
        faults=faults,
        not_offered={law: why for law, why in engine.laws.items() if why},
        confirmed=confirmed,
        law_prefixes=done,
        seconds=limits.seconds,
    )


class _Limits:
    """How long each part may take and has taken."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self._part, self._began, self.limit = "", 0.0, 0.0

    def start(self, part: str, limit: float) -> None:
        self.stop()
        self._part, self._began, self.limit = part, self._clock(), limit

    def stop(self) -> None:
        if self._part:
            self.seconds[self._part] = self._clock() - self._began

    def is_up(self) -> bool:
        return self._clock() - self._began > self.limit


def _laws(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plan: LawPlan,
    seed: int,
    modes: Sequence[str] | None,
    say: Callable[[str], None],
    limits: _Limits,
) -> tuple[dict[str, ModeLaw], tuple[str, ...], int]:
    """Part (b): all modes, and once more those that look suspicious."""
    target = Replay(engine.target)
    engines, draftable = engines_of(engine, target)
    try:
        engines = {mode: e for mode, e in engines.items() if modes is None or mode in modes}
        lab = LawLab(target, engines, draftable, seed * 1_000_003)
        say(f"laws: {', '.join(engines)}; up to {plan.prefixes} prefixes")
        done = 0

        def count() -> None:
            nonlocal done
            done += 1

        results = lab.run(prompts, plan, list(engines), count, limits.is_up)
        again = {mode for (mode, _), p in suspects(results).items() if p < SCREEN}
        if again:
            say(f"laws: once more with fresh draws: {', '.join(sorted(again))}")
            limits.stop()
            limits.start("repetition", limits.limit / 3)  # of few modes: more draws for each
            fresh = lab.run(prompts[:done], plan.doubled(), sorted(again), time_is_up=limits.is_up)
            results |= fresh
        return results, tuple(sorted(again)), done
    finally:
        for model in (target, *(getattr(e.drafter, "model", None) for e in engines.values())):
            if isinstance(model, Replay):
                model.close()


def engines_of(engine: Engine, target: Replay) -> tuple[dict[str, Engine], list[bool] | None]:
    """Mode -> engine behind models that remember; and which ids the draft can propose."""
    engines = {PLAIN: Engine(target)}
    model = getattr(engine.drafter, "model", None)
    if engine.drafter is None or not isinstance(model, LanguageModel):
        return engines, None
    from anydraft.vocabulary import compare

    drafter: Any = copy(engine.drafter)  # with its settings and tables
    drafter.model = Replay(model)
    for method in offered(engine.laws):
        if method != MATCH:
            engines[str(method)] = Engine(
                target, drafter, 1, method=str(method), guarantee="distribution"
            )
    comparison = compare(engine.vocabulary, model.vocabulary)
    return engines, (comparison.target_to_draft >= 0).tolist()


def prefixes(vocabulary: Vocabulary, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids to go on from: shipped prompts, every other one cut, often inside a word.

    Prompts that the vocabulary cannot spell are replaced by random ids.
    """
    source = random.Random(seed)
    usable = [i for i, data in enumerate(vocabulary.token_bytes) if data]
    found: list[list[int]] = []
    for number in range(count):
        ids: list[int] = []
        if number < len(PROMPTS):
            try:
                ids = list(vocabulary.encode_prompt(PROMPTS[number]))
            except AnydraftError:
                ids = []
        if not ids:
            ids = source.choices(usable, k=12)
        found.append(ids if number % 2 == 0 else ids[: max(2, len(ids) * 2 // 3)])
    if not found:
        raise VocabularyError("no prompt to go on from")
    return found


def _texts(engine: Engine, prompts: Sequence[Sequence[int]], effort: Effort) -> list[list[int]]:
    """Texts for histories of states: prompts strung together, one of them long."""
    limit = engine.target.max_length
    sizes = [TAIL // 2 + 7 * n for n in range(1, effort.histories + 1)]
    if effort.long_history:
        sizes.insert(1, LONG)
    strung = [i for prompt in prompts for i in prompt]
    while len(strung) < max(sizes) + len(sizes):
        strung += strung
    room = max(sizes) if limit is None else limit - TAIL
    return [strung[n : n + max(2, min(size, room))] for n, size in enumerate(sizes)]


def report_fields(report: LosslessReport) -> dict[str, Any]:
    """The report as one JSON object."""
    same, states = report.same, report.states
    forced = same.forced
    return {
        "verdict": report.verdict,
        "passed": report.passed,
        "diagnosis": report.diagnosis,
        "faults": [{"kind": f.kind, "mode": f.mode, "detail": f.detail} for f in report.faults],
        "target": report.target,
        "draft": report.draft,
        "effort": report.effort,
        "seconds": report.seconds,
        "identity": {
            "compared": same.compared,
            "identical": same.identical,
            "near_ties": same.near_ties,
            "tokens": same.tokens,
            "settings": same.settings,
            "num_draft_tokens": same.counts,
            "draft_n": same.draft_n,
            "draft_n_accepted": same.draft_n_accepted,
            "ended_early": same.ended_early,
        },
        "laws": [_mode_fields(report, result) for result in report.laws.values()],
        "laws_not_offered": report.not_offered,
        "law_prefixes": report.law_prefixes,
        "repeated": list(report.confirmed),
        "detectable_variation": {kind: report.detectable(kind) for kind in (FIRST, PAIR)},
        "teacher_forced": {
            "texts": len(forced),
            "tokens": sum(f.tokens for f in forced),
            "near_ties": sum(len(f.near_ties) for f in forced),
            "violations": sum(len(f.violations) for f in forced),
            "rounding": max((f.bound / 2 for f in forced), default=0.0),
        },
        "states": {
            "histories": states.histories,
            "rollbacks": states.rollbacks,
            "rows": states.rows,
            "longest": states.longest,
            "admissible": states.bound,
            "worst": states.worst,
        },
    }


def _mode_fields(report: LosslessReport, result: ModeLaw) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "mode": result.mode,
        "accepted": result.accepted,
        "drafted": result.drafted,
    }
    for kind in (FIRST, PAIR):
        tests = result.of_kind(kind)
        pooled = pool(tests)
        fields[kind.replace("law of the ", "").replace(" ", "_")] = {
            "draws": pooled.draws,
            "g": pooled.g,
            "df": pooled.df,
            "p": pooled.p_value,
            "p_by_prefix": [t.p_value for t in tests],
            "detectable_variation": result.detectable(kind, report.alpha),
        }
    return fields
