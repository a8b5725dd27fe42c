"""Does a draft pay here? Predicted from measured costs and counted acceptance, and said in words.

Nothing is timed end to end: the plain answers are generated once, every draft is followed along
them (`follow`), and its costs are probed (`probe`). SpeedModel does the rest.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anydraft.choice import Choice
from anydraft.engine import Engine, GenerationRequest, fold
from anydraft.measure.follow import Answer, Counts, follow, total
from anydraft.measure.prompts import OWN, Prompt
from anydraft.measure.rehearsal import Costs
from anydraft.noise import Noise
from anydraft.profile import Profile, Timing
from anydraft.speed import Curve, SpeedModel

LOOKUP = "lookup"
_FOLLOWED = {LOOKUP: 16}
_FOLLOWED_MODEL = 8
_PAYS = 1.03
"""Expected speed-up from which a draft is recommended."""
_RESAMPLES = 300
_LEAST_TOKENS = 6
"""Of an answer, however little time there is."""
_SERIAL_ROW = 0.5
"""A row that costs more than half a pass counts as serial verification."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one draft is expected to do on one kind of text.

    Attributes:
        kind: of text.
        num_draft_tokens: the best K; 0: plain decoding is best.
        speedup: at the best K above 0, relative to plain decoding; low and high: a 90 % interval.
        acceptance: of the first candidate.
        reason: "" if it pays, else "draft too slow", "acceptance too low", "verification serial".
        model: the arithmetic behind it.
    """

    kind: str
    num_draft_tokens: int
    speedup: float
    low: float
    high: float
    acceptance: float
    reason: str
    model: SpeedModel

    @property
    def pays(self) -> bool:
        return self.speedup >= _PAYS

    @property
    def sure(self) -> bool:
        """Whether the interval lies on one side of plain decoding."""
        return self.low > 1.0 or self.high < 1.0

    def to_dict(self) -> dict[str, Any]:
        model = self.model
        best = max(1, self.num_draft_tokens)
        return {
            "kind": self.kind,
            "pays": self.pays,
            "sure": self.sure,
            "num_draft_tokens": self.num_draft_tokens,
            "speedup": self.speedup,
            "speedup_interval": [self.low, self.high],
            "reason": self.reason,
            "acceptance": list(model.acceptance),
            "tokens_per_round": model.tokens_per_round(best),
            "ceiling_free_draft": ceiling(model.with_free_draft()),
            "ceiling_all_accepted": ceiling(model.with_acceptance(1.0)),
            "break_even_acceptance": model.break_even(),
            "table": model.table(),
        }


@dataclass(frozen=True, slots=True)
class DraftAdvice:
    """One draft: its costs, what is expected by kind of text, and which method auto takes."""

    name: str
    profile: Profile
    expectations: list[Expectation]
    choice: Choice

    @property
    def best(self) -> Expectation:
        """On the first kind of text: the user's, or ordinary text."""
        return self.expectations[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "draft": self.name,
            "method": str(self.choice.method),
            "method_reason": self.choice.reason,
            "expectations": [e.to_dict() for e in self.expectations],
            "profile": self.profile.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything `anydraft advise` says.

    Attributes:
        drafts: best first.
        plain_tokens_per_second: of plain decoding, from its measured costs.
        warnings: what makes the figures doubtful.
    """

    target: str
    drafts: list[DraftAdvice]
    plain_tokens_per_second: float
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        winner = self.drafts[0]
        return {
            "target": self.target,
            "verdict": verdict(self),
            "use": winner.name if winner.best.pays else None,
            "num_draft_tokens": winner.best.num_draft_tokens if winner.best.pays else 0,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "drafts": [d.to_dict() for d in self.drafts],
            "changes": changes(self),
            "warnings": self.warnings,
        }


def ceiling(model: SpeedModel) -> float:
    """The best speed-up at any K."""
    return max(model.speedup(count) for count in range(1, 17))


def plain_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    max_tokens: int,
    time_is_up: Callable[[], bool] = lambda: False,
    **sampling: Any,
) -> list[Answer]:
    """What plain decoding says, as one batch.

    Args:
        time_is_up: asked after every token but the first ones; True ends all answers.
        sampling: fields of the requests, the seed among them unless they are greedy.
    """
    rounds = 0

    def ended() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds >= _LEAST_TOKENS and time_is_up()

    requests = [
        GenerationRequest(**p.fields(), max_tokens=max_tokens, ignore_eos=True, **sampling)
        for p in prompts
    ]
    ids = [engine.encode(request) for request in requests]
    chunks = engine.plain().stream(
        ids, cancelled=ended, max_tokens=max_tokens, ignore_eos=True, **sampling
    )
    seed = sampling.get("seed")
    answers = []
    for prompt, request, prompt_ids, got in zip(
        prompts, requests, ids, fold(chunks, [seed] * len(ids)), strict=True
    ):
        law = request.sampling()
        answers.append(
            Answer(
                prompt_ids=prompt_ids,
                token_ids=got.token_ids,
                sampling=law,
                noise=None if law.greedy else Noise(sampling["seed"], 0, prompt_ids),
                messages=prompt.messages,
            )
        )
    return answers


def followed(
    engine: Engine,
    answers: Sequence[Answer],
    num_draft_tokens: int | None = None,
    time_is_up: Callable[[], bool] = lambda: False,
) -> list[Counts]:
    """How an engine's draft does along the answers.

    Args:
        num_draft_tokens: how many are followed; deeper ones are taken to be like the last.
        time_is_up: see `follow`.
    """
    assert engine.drafter is not None
    count = num_draft_tokens or _most(engine)
    return follow(engine.drafter, answers, count, time_is_up)


def _most(engine: Engine) -> int:
    """The largest K that is looked at."""
    name = None if engine.drafter is None else engine.drafter.name
    return _FOLLOWED.get(name or "", _FOLLOWED_MODEL)


def expect(
    engine: Engine,
    profile: Profile,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    counts: Sequence[Counts] | None = None,
    *,
    seed: int = 0,
) -> list[Expectation]:
    """What an engine's draft is expected to do; one Expectation per kind of text.

    Args:
        counts: what `followed` found along the answers; None: it is followed now.
        seed: of the intervals.
    """
    count = _most(engine)
    counts = followed(engine, answers) if counts is None else counts
    kinds = list(dict.fromkeys(p.kind for p in prompts))
    found = []
    for kind in kinds:
        members = [i for i, p in enumerate(prompts) if p.kind == kind]
        mine = [counts[i] for i in members]
        sampled = not answers[members[0]].sampling.greedy
        found.append(_expectation(kind, profile, mine, count, sampled, seed))
    return found


def _expectation(
    kind: str,
    profile: Profile,
    counts: list[Counts],
    most: int,
    sampled: bool,
    seed: int,
) -> Expectation:
    costs = Costs.of(profile)
    probed = profile.draft_curve()(most)

    def model_of(chosen: Sequence[Counts]) -> SpeedModel:
        added = total(chosen)
        model = profile.speed_model(added.acceptance, added.offers, sampled=sampled)
        return replace(model, draft=model.draft.scaled(as_drafted(costs, probed, chosen, most)))

    model = model_of(counts)
    best = max(range(1, most + 1), key=model.speedup)
    speedup = model.speedup(best)
    source = random.Random(seed)
    resampled = []
    for _ in range(_RESAMPLES):
        other = model_of(source.choices(counts, k=len(counts)))
        resampled.append(_shaken(other, profile, source).speedup(best))
    resampled.sort()
    return Expectation(
        kind=kind,
        num_draft_tokens=best if speedup >= 1 else 0,
        speedup=speedup,
        low=resampled[int(0.05 * _RESAMPLES)],
        high=resampled[int(0.95 * _RESAMPLES)],
        acceptance=model.acceptance[0] if model.acceptance else 0.0,
        reason="" if speedup >= _PAYS else why_not(model),
        model=model,
    )


def as_drafted(costs: Costs, probed: float, counts: Sequence[Counts], count: int) -> float:
    """Draft calls for `count` candidates along answers, relative to `probed` seconds, the probe's.

    The probe pays for everything that it drafts; in a real round some of it has been read already.
    """
    later = [one for c in counts for one in c.log[1:] if one.asked == count]
    if not costs.by_passes or not later:
        return 1.0
    return statistics.fmean(costs.of_draft(one) for one in later) / probed


def _shaken(model: SpeedModel, profile: Profile, source: random.Random) -> SpeedModel:
    """The model with costs moved by as much as their medians may be wrong."""

    def factor(timing: Timing) -> float:
        # Standard error of a median of normal values, from the quartiles. Few measurements say
        # little about their own spread: then that of the pass that was repeated most counts.
        spread = max(timing.spread, profile.quiet.spread if timing.count < 5 else 0.0)
        return moved(0.93 * spread / math.sqrt(max(1, timing.count)))

    def moved(error: float) -> float:
        return max(0.5, 1 + source.gauss(0, 1) * error)

    passes = next(iter(profile.target.verify.values()))
    points = model.verify.points
    shaken = {n: s * factor(passes[n]) if n in passes else s for n, s in points.items()}
    between = model.verify.unevenness()
    for n in range(min(points), max(points)):
        if n not in points:
            shaken[n] = model.verify(n) * moved(between)
    verify = Curve(shaken)
    calls = next(iter(profile.draft.draft.values())) if profile.draft else {}
    scale = factor(next(iter(calls.values()))) if calls else 1.0
    return replace(model, verify=verify, draft=model.draft.scaled(scale))


def why_not(model: SpeedModel) -> str:
    """The reason, of three, why a draft does not pay."""
    if model.row_cost() >= _SERIAL_ROW:
        return "verification serial"
    needed = model.break_even()
    if needed is None or needed > 0.8:  # hardly any draft is right so often
        return "draft too slow"
    free = ceiling(model.with_free_draft())
    return "acceptance too low" if free < _PAYS or needed < 0.5 else _nearer(model, needed)


def _nearer(model: SpeedModel, needed: float) -> str:
    """Which of draft cost and acceptance is relatively farther from where it would have to be."""
    reached = model.acceptance[0] if model.acceptance else 0.0
    allowed = max(1e-9, reached - model.row_cost()) * model.verify(1)
    too_slow = model.draft(1) / allowed
    too_wrong = (1 - reached) / max(1e-9, 1 - needed)
    return "draft too slow" if too_slow > too_wrong else "acceptance too low"


def rank(drafts: Sequence[DraftAdvice]) -> list[DraftAdvice]:
    """Best first."""
    return sorted(drafts, key=lambda d: d.best.speedup, reverse=True)


def verdict(advice: Advice) -> str:
    """The first line."""
    winner = advice.drafts[0]
    best = winner.best
    spread = f"{best.low:.2f} to {best.high:.2f}"
    if not best.pays:
        who = f"None of these drafts pays for {advice.target} here"
        if len(advice.drafts) == 1:
            who = f"Do not use {winner.name} for {advice.target} here"
        return (
            f"{who}: {best.reason}. On {best.kind} the best, {winner.name}, is expected at "
            f"{best.speedup:.2f}x of plain decoding ({spread})."
        )
    doubt = "" if best.sure else " The interval includes 1: it may gain nothing."
    return (
        f"Use {winner.name} with {_tokens(best.num_draft_tokens)}: {best.speedup:.2f}x "
        f"expected on {best.kind} ({spread}).{doubt}"
    )


def _tokens(count: int) -> str:
    return "1 draft token" if count == 1 else f"{count} draft tokens"


def changes(advice: Advice) -> list[str]:
    """What would change the verdict, or the figure."""
    said = []
    for draft in advice.drafts:
        best, model = draft.best, draft.best.model
        if best.pays:
            continue
        one = model.verify(1)
        needed = model.break_even()
        free, perfect = ceiling(model.with_free_draft()), ceiling(model.with_acceptance(1.0))
        if best.reason == "verification serial":
            said.append(
                f"{draft.name}: an extra row costs {model.row_cost():.2f} of a pass, so checking "
                f"is hardly quicker than generating (all accepted: {perfect:.2f}x). Another "
                "runtime or dtype of the target may check in parallel: float32 in torch_hf packs "
                "its weights for that."
            )
        elif best.reason == "draft too slow":
            wanted = "no acceptance would do" if needed is None else f"it would need {needed:.2f}"
            said.append(
                f"{draft.name}: a draft of one token takes {model.draft(1) / one:.2f} of a target "
                f"pass. At this speed {wanted} (acceptance is {best.acceptance:.2f}); a draft that "
                f"took no time would give {free:.2f}x."
            )
        else:
            wanted = "never" if needed is None else f"at {needed:.2f}"
            said.append(
                f"{draft.name}: {best.acceptance:.2f} of first candidates are accepted; it would "
                f"pay {wanted}. If all were accepted: {perfect:.2f}x."
            )
    for draft in advice.drafts:
        for other in draft.expectations[1:]:
            if other.pays != draft.best.pays or draft.name == LOOKUP:
                state = "pays" if other.pays else "does not pay"
                said.append(
                    f"{draft.name} {state} on {other.kind}: {other.speedup:.2f}x with "
                    f"{_tokens(max(1, other.num_draft_tokens))} "
                    f"({other.low:.2f} to {other.high:.2f})."
                )
    return said


def warnings_of(profiles: Sequence[Profile]) -> list[str]:
    """What makes the figures doubtful."""
    reasons = list(dict.fromkeys(p.quiet.why_not() for p in profiles if not p.quiet.ok))
    return [
        f"the machine was not quiet ({reason}): measure again before you rely on these figures"
        for reason in reasons
    ]


def default_prompts() -> list[Prompt]:
    """Ours: ordinary text and text that repeats."""
    return list(OWN)
