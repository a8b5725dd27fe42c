"""The costs of a pair on this machine: v(n), drafting, overhead, memory.

    profile = probe(engine)                    # an Engine as anydraft.load makes it
    model = profile.speed_model(acceptance)    # -> expected speed for every K

Everything is warmed up first, and measured in turns as a real run takes them, draft then target,
so that a machine that slows down slows all figures and each model finds the caches as the other
left them. Medians and quartiles are kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import psutil

from anydraft.drafter import DraftContext, Drafter
from anydraft.drafters import make_drafter
from anydraft.engine import Engine
from anydraft.model import Extension, GreedyModel, LanguageModel
from anydraft.profile import (
    DraftProfile,
    Profile,
    Quiet,
    TargetProfile,
    Timing,
    model_facts,
    save_profile,
    without_draft,
)
from anydraft.sampling import SamplingParams

WIDTHS = tuple(range(1, 18))
CONTEXTS = (64, 512)
COUNTS = (1, 2, 4, 8, 16)
"""K of the measured draft calls; those between lie on straight lines."""
_MIN_TURNS = 3
_TOKENS_PER_ROUND = 2  # how far the text goes on between two draft calls

Progress = Callable[[str, float], None]
"""(what is being measured, share done)."""

TEXT = """\
The harbour office opens at seven. Before that, the night watch writes down which boats came in,
where they lie and what they carry; after that, the day shift checks the list against the berths.
On a quiet day there are twenty entries, in the herring season more than two hundred.

def berth_of(boat, plan):
    for berth, taken_by in plan.items():
        if taken_by == boat.name:
            return berth
    return None

Nobody remembers why berth 12 stays empty. The oldest plan, drawn in 1931, already leaves it out:
the numbers go from 11 to 13, and a note in the margin says only "not this one". When the new quay
was built, the engineers kept the gap. Some say that there is a rock below the surface, others that
it was a matter of taxes; the harbour master, asked about it, offers coffee and changes the subject.

| day       | boats | tonnes |
|-----------|-------|--------|
| Monday    | 31    | 118    |
| Tuesday   | 28    | 97     |
| Wednesday | 40    | 156    |
"""
"""What the passes read: several kinds of text, written for this."""


def probe(
    engine: Engine,
    *,
    seconds: float = 20.0,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    progress: Progress | None = None,
    keep: bool = True,
) -> Profile:
    """Measure an engine's target and draft.

    Args:
        engine: its target and its drafter; no drafter: plain decoding alone.
        seconds: about how long to measure; repetitions follow from it.
        widths: n of v(n); 1 is always among them.
        contexts: tokens before the passes; those beyond a model's limit are left out.
        progress: told now and then.
        keep: keep the profile in the user's cache, where the engine finds it next time.

    Raises:
        AnydraftError: a model that cannot be run.
    """
    told = progress or (lambda what, share: None)
    target = engine.target
    widths = sorted({1, *widths})
    limit = target.max_length or 1 << 30
    lengths = [c for c in contexts if c + max(widths) <= limit] or [max(1, limit // 4)]
    watch = _Load()
    overhead = _Overhead(engine)
    overhead.measure()
    timed = _timed_drafter(engine)
    benches = [_Bench(target, timed, length, widths) for length in lengths]
    started = time.perf_counter()
    turns = 0
    try:
        for bench in benches:
            bench.turn(keep=False)  # first passes also pay for memory
        while turns < _MIN_TURNS or time.perf_counter() - started < 0.9 * seconds:
            for bench in benches:
                bench.turn()
            turns += 1
            if turns == 1:  # short runs of their own, dear beside the passes
                overhead.measure()
            told("passes of target and draft", min(1.0, (time.perf_counter() - started) / seconds))
    finally:
        for bench in benches:
            bench.close()
    profile = Profile(
        target=TargetProfile(
            facts=model_facts(target),
            verify={b.length: _timings(b.passes) for b in benches},
            overhead=Timing.of(overhead.plain),
            logits={b.length: _timings(b.logits) for b in benches if b.logits},
            sampling=max(0.0, min(overhead.sampled) - min(overhead.plain)),
            read=min(b.target_read for b in benches),
        ),
        draft=None if timed is None else _draft_profile(engine, benches, overhead),
        quiet=watch.quiet(benches[0].passes[1]),
        memory=psutil.Process().memory_info().rss,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if keep:
        save_profile(profile, target, draft_source(engine.drafter))
        save_profile(without_draft(profile), target)  # other drafts start from the target's costs
    return profile


def draft_source(drafter: Drafter | None) -> Any:
    """What a profile's key knows a drafter by: its model, or its name."""
    return None if drafter is None else getattr(drafter, "model", drafter.name)


def _draft_profile(engine: Engine, benches: list[_Bench], overhead: _Overhead) -> DraftProfile:
    source = draft_source(engine.drafter)
    first = benches[0]
    return DraftProfile(
        facts={"name": source} if isinstance(source, str) else model_facts(source),
        draft={b.length: {k: Timing.of(s) for k, s in b.calls.items()} for b in benches},
        steps={k: sum(s) / len(s) for k, s in first.fed.items()},
        step={b.length: Timing.of(b.steps) for b in benches if b.steps},
        retokenise=Timing.of(first.beside).median,
        read=min(b.draft_read for b in benches),
        overhead=Timing.of(overhead.drafted),
    )


class _TimedModel:
    """A model that notes how long its passes took; for the draft inside its drafter."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.seconds = 0.0
        self.passes: list[tuple[int, float]] = []  # (tokens, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def extend(self, batch: Sequence[Extension]) -> Any:
        started = time.perf_counter()
        result = self._model.extend(batch)
        took = time.perf_counter() - started
        self.seconds += took
        self.passes.append((sum(len(ids) for _, ids, _ in batch), took))
        return result


def _timed_drafter(engine: Engine) -> tuple[Drafter, _TimedModel | None] | None:
    if engine.drafter is None:
        return None
    model = getattr(engine.drafter, "model", None)
    if model is None:
        return engine.drafter, None
    timed = _TimedModel(model)
    return make_drafter(timed, engine.vocabulary), timed


@dataclass(slots=True)
class _Overhead:
    """Everything in a round but the passes, from short real runs."""

    engine: Engine
    plain: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)

    def measure(self) -> None:
        ids = self.engine.vocabulary.encode_prompt(TEXT[:300])
        for found, fields in (
            (self.plain, {"num_draft_tokens": 0}),
            (self.sampled, {"num_draft_tokens": 0, "temperature": 1.0, "seed": 1}),
            (self.drafted, {"num_draft_tokens": 2}),
        ):
            if found is self.drafted and self.engine.drafter is None:
                continue
            got = self.engine.generate(ids, max_tokens=6, ignore_eos=True, **fields)
            found.append(got.stats.overhead_seconds / got.stats.rounds)


class _Bench:
    """Passes and draft calls at one context length."""

    def __init__(
        self,
        target: LanguageModel,
        timed: tuple[Drafter, _TimedModel | None] | None,
        length: int,
        widths: Sequence[int],
    ) -> None:
        self.length = length
        self.passes: dict[int, list[float]] = {n: [] for n in widths}
        # Greedy requests may do without logits; then passes with them are measured as well.
        self._greedy = isinstance(target, GreedyModel)
        with_logits = {1, *(n for n in widths if n - 1 in COUNTS)} if self._greedy else set()
        self.logits: dict[int, list[float]] = {n: [] for n in sorted(with_logits)}
        self.calls: dict[int, list[float]] = {}
        self.fed: dict[int, list[int]] = {}
        self.steps: list[float] = []
        self.beside: list[float] = []
        self.target_read = self.draft_read = 0.0
        self._target = target
        self._ids = _ids(target, length + 4096)
        self._state = target.new_state()
        started = time.perf_counter()
        target.extend([(self._state, self._ids[:length], 1)])
        self.target_read = (time.perf_counter() - started) / length
        self._source = random.Random(length)
        self._drafter = timed[0] if timed else None
        self._model = timed[1] if timed else None
        self._session: Any = None
        self._at = length
        if self._drafter is not None:
            context = DraftContext(self._ids[:length], SamplingParams())
            self._session = self._drafter.new_session(context)
            started = time.perf_counter()
            self._drafter.draft([(self._session, self._ids[:length], 1)])
            self.draft_read = (time.perf_counter() - started) / length

    def turn(self, keep: bool = True) -> None:
        """Every width once, in a new order, each K's draft call before its pass."""
        # Plain decoding is what all is compared with: it is measured more often.
        order = [*self.passes, 1, 1]
        self._source.shuffle(order)
        for width in order:
            if self._drafter is not None and width - 1 in COUNTS:
                self._draft(width - 1, keep)
            took = self._pass(width, greedy=self._greedy)
            if keep:
                self.passes[width].append(took)
        for width, found in self.logits.items():
            took = self._pass(width, greedy=False)
            if keep:
                found.append(took)

    def _pass(self, width: int, *, greedy: bool) -> float:
        """Seconds of one target pass, as the loop runs it."""
        batch: list[Extension] = [(self._state, self._ids[:width], width)]
        started = time.perf_counter()
        if greedy:
            assert isinstance(self._target, GreedyModel)
            self._target.extend_greedy(batch, [()])
        else:
            self._target.extend(batch)
        took = time.perf_counter() - started
        self._state.rollback(self.length)
        return took

    def _draft(self, count: int, keep: bool) -> None:
        assert self._drafter is not None
        self._at += _TOKENS_PER_ROUND
        if self._at >= len(self._ids):
            self._at = self.length
        tokens = self._ids[: self._at]
        before, model = self._session.tokens_processed, self._model
        if model is not None:
            model.seconds = 0.0
            model.passes.clear()
        started = time.perf_counter()
        self._drafter.draft([(self._session, tokens, count)])
        took = time.perf_counter() - started
        if not keep:
            return
        self.calls.setdefault(count, []).append(took)
        self.fed.setdefault(count, []).append(self._session.tokens_processed - before)
        self.beside.append(took - (0.0 if model is None else model.seconds))
        if model is not None:
            self.steps += [seconds for fed, seconds in model.passes if fed == 1]

    def close(self) -> None:
        self._state.close()
        if self._session is not None:
            self._session.close()


def _timings(measured: dict[int, list[float]]) -> dict[int, Timing]:
    return {n: Timing.of(seconds) for n, seconds in measured.items()}


def _ids(model: LanguageModel, count: int) -> list[int]:
    """Target ids of real text, as many as wanted."""
    ids = model.vocabulary.encode_prompt(TEXT)
    more = model.vocabulary.encode(TEXT.encode()) or ids
    while len(ids) < count:
        ids = [*ids, *more]
    return ids[:count]


class _Load:
    """How busy the machine is with others while we measure."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._started = time.perf_counter()
        self._own = self._own_seconds()
        self._idle = self._idle_seconds()

    def _own_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _idle_seconds(self) -> float:
        times = psutil.cpu_times()
        return float(times.idle + getattr(times, "iowait", 0.0))

    def quiet(self, repeated: Sequence[float]) -> Quiet:
        """From one pass's timings, in the order in which they were taken."""
        cpus = psutil.cpu_count() or 1
        wall = (time.perf_counter() - self._started) * cpus
        busy = wall - (self._idle_seconds() - self._idle)
        others = max(0.0, busy - (self._own_seconds() - self._own)) / wall if wall > 0 else 0.0
        third = max(1, len(repeated) // 3)
        first, last = Timing.of(repeated[:third]).median, Timing.of(repeated[-third:]).median
        return Quiet(Timing.of(repeated).spread, last / first - 1, round(others, 3))
