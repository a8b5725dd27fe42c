"""Opening a pair for measurement, and describing what was opened."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from anydraft.errors import RequestError
from anydraft.measure.bench_native import native_generation
from anydraft.measure.bench_plan import SEED_IDENTICAL, PairSpec, Plan
from anydraft.measure.bench_run import LoadedPair
from anydraft.measure.timed import TimedModel

if TYPE_CHECKING:
    from anydraft.drafter import Drafter
    from anydraft.engine import Engine


def load_pair(pair: PairSpec, plan: Plan) -> LoadedPair:
    """A pair from the names and options in its spec.

    Raises:
        AnydraftError: in words that say what to do.
    """
    from anydraft.engine import load

    engine = load(
        pair.target,
        pair.draft,
        draft_options=dict(pair.draft_options),
        **dict(pair.target_options),
    )
    return from_engine(pair, plan, engine)


def from_engine(pair: PairSpec, plan: Plan, engine: Engine) -> LoadedPair:
    """A pair around an engine that is loaded already."""
    native, reason = None, "not asked for"
    if plan.native != "none" and "greedy" in plan.sampling:
        native, reason = native_generation(pair, engine, plan.native == "all")
    timed = TimedModel(engine.target)
    return LoadedPair(engines(timed, engine.drafter, plan), timed, native, reason)


def engines(target: Any, drafter: Drafter | None, plan: Plan) -> dict[str, Engine]:
    """One engine per method, around the same models; costs known by now seed their policies.

    Raises:
        RequestError: a method that does not exist or does not apply to the draft.
    """
    from anydraft.engine import Engine

    takes_method = "method" in inspect.signature(Engine).parameters
    made = {}
    for method in dict.fromkeys((SEED_IDENTICAL, *plan.methods)):
        if method != SEED_IDENTICAL and not takes_method:
            raise RequestError(f"no method {method!r}; there is: {SEED_IDENTICAL}")
        options: dict[str, Any] = {"method": method} if takes_method else {}
        made[method] = Engine(target, drafter, **options)
    return made


def describe_pair(pair: PairSpec, loaded: LoadedPair) -> dict[str, Any]:
    """A pair's entry in the results."""
    drafter = loaded.engine.drafter
    draft_model = getattr(drafter, "model", None)
    draft: dict[str, Any] | None = None
    if draft_model is not None:
        draft = _describe(draft_model, pair.draft_options)
    elif drafter is not None:
        draft = {"name": pair.draft, "runtime": None, "options": {}}
    return {
        "id": pair.label,
        "target": _describe(loaded.timed.model, pair.target_options),
        "draft": draft,
        "note": pair.note,
        "native": "measured" if loaded.native is not None else loaded.native_reason,
    }


def _describe(model: Any, options: Any) -> dict[str, Any]:
    layers = getattr(getattr(model, "engine", None), "linears", [])
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if any(layer.kernel.name == "int4" for layer in layers):
        dtype = "int4"
    return {
        "name": model.name,
        "runtime": model.runtime,
        "dtype": dtype or None,
        "width_exact": getattr(model, "width_exact", None),
        "options": {k: v if isinstance(v, (int, float, bool)) else str(v)
                    for k, v in dict(options).items()},
    }  # fmt: skip
