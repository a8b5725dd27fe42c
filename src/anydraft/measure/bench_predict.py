"""What a pair is expected to do, fixed before it is measured, from costs and from other prompts.

Costs come from the probe, rounds from drafting along plain answers to the calibration prompts: none
of them is a prompt of a workload, but there are some of each kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anydraft.measure.bench_plan import AUTO, Plan, parse_sampling
from anydraft.measure.bench_run import LoadedPair
from anydraft.measure.follow import Answer, Counts, total
from anydraft.measure.rehearsal import Costs, rehearse, speedup
from anydraft.measure.workloads import KINDS, calibration
from anydraft.noise import Noise
from anydraft.speed import MAX_K

if TYPE_CHECKING:
    from anydraft.engine import Generation, GenerationRequest
    from anydraft.profile import Profile

PROBE_SECONDS = 16.0
CONTEXTS = (128,)
SHOWN_K = 8
_PROMPTS = 8
"""Of the calibration prompts; of each kind at least two."""


def predict(
    loaded: LoadedPair, plan: Plan, say: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """Measure a pair's costs, rehearse its rounds, and predict its speed-up at every K.

    Args:
        loaded: with a drafter or without; without, only costs are told.
        plan: whose sampling settings and lengths are meant.
        say: told what is being done.

    Returns:
        The "prediction" of a pair in the results; see docs/results.md.
    """
    from anydraft.measure.probe import probe
    from anydraft.profile import load_profile

    engine = loaded.engine
    say("costs")
    kept = load_profile(engine.target, engine.drafter) is not None
    profile = probe(
        engine,
        seconds=PROBE_SECONDS,
        widths=(*range(1, max(_lengths(plan)) + 2), MAX_K + 1),
        contexts=CONTEXTS,
        progress=lambda what, share: say(what),
        keep=not kept,  # what a longer probe found is not replaced
    )
    result: dict[str, Any] = {"sampling": {}}
    context = None
    if engine.drafter is not None:
        for text in plan.sampling:
            say(f"acceptance, {text}")
            sampling = parse_sampling(text)
            answers, kinds, context = _answers(loaded, plan, sampling)
            rehearsed = rehearse(
                engine.drafter,
                answers,
                _lengths(plan),
                lambda k, text=text: say(f"{text}, K = {k}"),  # type: ignore[misc]
            )
            sampled = sampling.get("temperature", 0.0) > 0
            result["sampling"][text] = _expected(
                profile, plan, rehearsed, kinds, context, sampled=sampled
            )
    return result | _costs(profile, context)


def _lengths(plan: Plan) -> list[int]:
    """Every K that is predicted."""
    fixed = [k for k in plan.num_draft_tokens if isinstance(k, int) and 0 < k <= MAX_K]
    return sorted({*range(1, SHOWN_K + 1), *fixed})


def _costs(profile: Profile, context: int | None) -> dict[str, Any]:
    draft = profile.draft
    return {
        "context": context,
        "verify_seconds": _points(profile.verify_curve(context).points),
        "draft_seconds": _points(profile.draft_curve(context).points) if draft else {},
        "overhead_seconds": profile.target.overhead.median,
        "quiet": profile.quiet.ok,
        "not_quiet": profile.quiet.why_not(),
        "memory": profile.memory,
    }


def _points(points: Mapping[int, float]) -> dict[str, float]:
    return {str(n): seconds for n, seconds in sorted(points.items())}


def _expected(
    profile: Profile,
    plan: Plan,
    rehearsed: Mapping[int, Sequence[Counts]],
    kinds: Sequence[str],
    context: int,
    *,
    sampled: bool,
) -> dict[str, Any]:
    most = max(rehearsed)
    counts = total(rehearsed[most])
    model = profile.speed_model(counts.acceptance, counts.offers, context=context, sampled=sampled)
    costs = Costs.of(profile, context, sampled=sampled)
    expected = {k: speedup(answers, costs, kinds) for k, answers in rehearsed.items()}
    free = {k: speedup(answers, costs.with_free_draft(), kinds) for k, answers in rehearsed.items()}
    best = max(expected, key=lambda k: expected[k])
    told = {"0": 1.0} | {str(k): value for k, value in expected.items()}
    if AUTO in plan.num_draft_tokens:
        told[AUTO] = max(1.0, expected[best])
    return {
        "acceptance": list(model.acceptance),
        "offered": list(model.offered),
        "speedup": told,
        "free_draft": {"0": 1.0} | {str(k): value for k, value in free.items()},
        "all_accepted": {str(k): model.with_acceptance(1.0).speedup(k) for k in (0, *rehearsed)},
        "best": best if expected[best] > 1 else 0,
        "break_even": model.break_even(most),
        "row_cost": model.row_cost(most),
        "draft_cost": model.draft(1) / model.verify(1),
    }


def _answers(
    loaded: LoadedPair, plan: Plan, sampling: Mapping[str, Any]
) -> tuple[list[Answer], list[str], int]:
    """What plain decoding says to the calibration prompts, their kinds and typical context."""
    from anydraft.engine import GenerationRequest
    from anydraft.measure.bench import fields_of

    engine = loaded.engine
    limit = engine.target.max_length
    answers, kinds, lengths = [], [], []
    for index, prompt in enumerate(calibration(plan.kinds, _each(plan))):
        said = [{"role": "user", "content": prompt.turns[0]}]
        fields = fields_of(plan, loaded, said) | dict(sampling)
        fields |= {"max_tokens": plan.max_tokens, "seed": plan.seed + 1000 + index}
        request = GenerationRequest(**fields)
        if limit is not None and len(_ids(loaded, fields)) >= limit:
            continue
        answer = engine.plain().generate(**fields)
        answers.append(_as_answer(loaded, request, answer))
        kinds.append(prompt.kind)
        lengths.append(len(answers[-1].prompt_ids) + len(answer.token_ids) // 2)
    return answers, kinds, round(statistics.median(lengths)) if lengths else 64


def _each(plan: Plan) -> int:
    """Calibration prompts of each kind."""
    return max(2, _PROMPTS // len(plan.kinds or KINDS))


def _ids(loaded: LoadedPair, fields: Mapping[str, Any]) -> Sequence[int]:
    vocabulary = loaded.engine.vocabulary
    if "messages" in fields:
        return vocabulary.encode_chat(fields["messages"])
    return vocabulary.encode_prompt(fields["prompt"])


def _as_answer(loaded: LoadedPair, request: GenerationRequest, answer: Generation) -> Answer:
    ids = loaded.engine.encode(request)
    sampling = request.sampling()
    messages = request.messages
    return Answer(
        prompt_ids=ids,
        token_ids=answer.token_ids,
        sampling=sampling,
        noise=None if sampling.greedy else Noise(answer.seed or 0, 0, ids),
        messages=None if messages is None else [dict(m) for m in messages],
    )
