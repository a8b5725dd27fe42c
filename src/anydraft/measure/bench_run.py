"""One timed generation by each contender, and what is written down of it."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anydraft.measure.bench_machine import EnergyMeter
from anydraft.measure.bench_plan import SEED_IDENTICAL, Contender
from anydraft.measure.timed import Pass, TimedModel

if TYPE_CHECKING:
    from anydraft.engine import Engine, Generation, GenerationRequest
    from anydraft.measure.bench_native import NativeGeneration

PLAIN_EVERY = 4
"""Plain decoding takes a turn before every so many others, so that no pair of runs is far apart."""


@dataclass(slots=True, eq=False)
class LoadedPair:
    """A pair in memory: one engine per method, all with one target.

    Attributes:
        engines: by method; at least that of "match".
        native: the target's runtime's own generation, or None.
        native_reason: why there is none.
    """

    engines: dict[str, Engine]
    timed: TimedModel
    native: NativeGeneration | None = None
    native_reason: str = ""

    @property
    def engine(self) -> Engine:
        return self.engines[SEED_IDENTICAL]

    def close(self) -> None:
        self.engine.close()  # they share their models
        if self.native is not None:
            self.native.close()


def turns(contenders: Sequence[Contender], block: int) -> list[Contender]:
    """The order of one block: others rotated from block to block, plain decoding among them."""
    plain, *others = contenders
    shift = block % len(others) if others else 0
    others = others[shift:] + others[:shift]
    order = [plain]
    for index, contender in enumerate(others):
        if index and index % PLAIN_EVERY == 0:
            order.append(plain)
        order.append(contender)
    return order


def generate(
    pair: LoadedPair,
    contender: Contender,
    fields: Mapping[str, Any],
    energy: EnergyMeter,
    cancelled: Callable[[], bool],
) -> tuple[dict[str, Any], Generation | None]:
    """One run: what it measured, and the answer (None from the runtime's own generation)."""
    if contender.kind.startswith("native"):
        return _native(pair, contender, fields, energy), None
    from anydraft.engine import fold

    engine = pair.engines[contender.method]
    if contender.kind == "plain":
        engine = engine.plain()
    pair.timed.passes.clear()
    energy.read()
    chunks = engine.stream(
        cancelled=cancelled, num_draft_tokens=contender.num_draft_tokens, **fields
    )
    answer = fold(chunks, [fields.get("seed")])[0]
    record = _identity_of(answer.token_ids) | _rounded(_timing(answer, pair.timed.passes))
    return record | {"joules": energy.read()}, answer


def _identity_of(token_ids: Sequence[int]) -> dict[str, Any]:
    text = ",".join(str(i) for i in token_ids)
    return {"tokens": len(token_ids), "output": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    """Seconds to a ten millionth: more digits are noise."""
    return {k: round(v, 7) if isinstance(v, float) else v for k, v in record.items()}


def _timing(answer: Generation, passes: Sequence[Pass]) -> dict[str, Any]:
    """Seconds of the whole and, in `later_*`, of what came after the first round.

    The first round also pays for the prompt. Its share of the draft's time is what is left of it
    after the target's pass and an average round's overhead.
    """
    stats = answer.stats
    first_pass = passes[0].seconds if passes else 0.0
    rounds = max(stats.rounds, 1)
    overhead = stats.overhead_seconds / rounds
    first_draft = stats.first_token_seconds - first_pass - overhead
    first_draft = min(max(first_draft, 0.0), stats.draft_seconds)
    widths: dict[int, list[float]] = {}
    for one in passes[1:]:
        widths.setdefault(one.tokens, []).append(one.seconds)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "first_tokens": stats.first_round_tokens,
        "seconds": stats.total_seconds,
        "first_seconds": stats.first_token_seconds,
        "rounds": stats.rounds,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "drafted_at": list(stats.drafted_at),
        "accepted_at": list(stats.accepted_at),
        "later_draft_seconds": stats.draft_seconds - first_draft,
        "later_target_seconds": max(stats.target_seconds - first_pass, 0.0),
        "later_overhead_seconds": stats.overhead_seconds - overhead,
        "passes": {
            str(w): [len(t), round(statistics.median(t), 7)] for w, t in sorted(widths.items())
        },
        "finish_reason": answer.finish_reason,
        "draft_error": stats.draft_error,
    }


def _native(
    pair: LoadedPair, contender: Contender, fields: Mapping[str, Any], energy: EnergyMeter
) -> dict[str, Any]:
    assert pair.native is not None
    ids = pair.engine.encode(_request(fields))
    length = contender.num_draft_tokens if contender.kind == "native_draft" else 0
    energy.read()
    run = pair.native.run(ids, int(fields["max_tokens"]), int(length))
    return _identity_of(run.token_ids) | {
        "prompt_tokens": len(ids),
        "first_tokens": run.first_tokens,
        "seconds": round(run.seconds, 7),
        "first_seconds": round(run.first_seconds, 7),
        "finish_reason": None,
        "joules": energy.read(),
    }


def _request(fields: Mapping[str, Any]) -> GenerationRequest:
    from anydraft.engine import GenerationRequest

    return GenerationRequest(**fields)


def judge(
    pair: LoadedPair,
    contender: Contender,
    fields: Mapping[str, Any],
    answer: Generation | None,
    record: Mapping[str, Any],
    plain: tuple[Mapping[str, Any], Generation],
) -> str:
    """Whether a run said what plain decoding said in the same block.

    Returns:
        "identical"; "near-tie": another token, where rounding decides between two (see
        anydraft.identity); "violation": another token for no such reason, a bug; "other": another
        answer of the runtime's own generation; "not compared": no seed-identity is promised.
    """
    reference, plain_answer = plain
    if record["output"] == reference["output"]:
        return "identical"
    if answer is None:
        return "other"
    request = _request({**fields, "num_draft_tokens": contender.num_draft_tokens})
    if contender.method != SEED_IDENTICAL and not request.sampling().greedy:
        return "not compared"
    from anydraft.identity import compare_with_plain

    engine = pair.engines[contender.method]
    report = compare_with_plain(engine, answer, request, plain_answer)
    return "near-tie" if report.passed else "violation"
