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
from copy import copy
from datetime import datetime, timezone
from typing import Any

import psutil

from anydraft.drafter import DraftContext, Drafter
from anydraft.engine import Engine
from anydraft.measure.follow import passes_of
from anydraft.measure.timed import TimedModel
from anydraft.model import Extension, GreedyModel, LanguageModel
from anydraft.profile import (
    NOT_MEASURED,
    DraftProfile,
    Profile,
    Quiet,
    TargetProfile,
    Timing,
    draft_facts,
    model_facts,
    save_profile,
    without_draft,
)
from anydraft.sampling import SamplingParams

WIDTHS = tuple(range(1, 18))
CONTEXTS = (64, 512)
COUNTS = (1, 2, 4, 8, 16)
"""K of the measured draft calls; those between lie on straight lines."""
TURNS = 4
"""Fewest turns, however little time there is; of three or more the first one is a warm-up."""
_NEARBY = 256  # tokens that a context may grow by while drafts are measured

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
    turns: int = TURNS,
    sampled: bool = True,
    known: Profile | None = None,
    progress: Progress | None = None,
    keep: bool = True,
) -> Profile:
    """Measure an engine's target and draft.

    Args:
        engine: its target and its drafter; no drafter: plain decoding alone.
        seconds: how long to measure; repetitions follow from it.
        widths: n of v(n); 1 is always among them. Drafts are measured for those of COUNTS whose
            passes are.
        contexts: tokens before the passes; those beyond a model's limit are left out.
        turns: fewest repetitions, even if they take longer than `seconds`. With 1 the overhead of a
            round with a draft is not measured: it counts as that of plain decoding.
        sampled: measure also what sampled requests cost beyond greedy ones.
        known: a profile of the same target, made a moment ago: only the draft is measured.
        progress: told now and then.
        keep: keep the profile in the user's cache, where the engine finds it next time.

    Raises:
        AnydraftError: a model that cannot be run.
    """
    told = progress or (lambda what, share: None)
    started = time.perf_counter()
    target = engine.target
    timed = _timed_drafter(engine)
    widths = sorted({1, *widths})
    limit = target.max_length or 1 << 30
    lengths = [c for c in contexts if c + max(widths) <= limit] or [max(1, limit // 4)]
    counts = [count for count in COUNTS if count + 1 in widths]
    drafted = turns > 1
    if known is not None:  # the target's passes only leave the caches as they do in a real round
        sampled = False
        alone = timed is not None and timed[1] is None
        widths = [] if alone else [1, *(count + 1 for count in counts)]
        if alone:  # a few calls tell; they take no time
            seconds, turns = 0.0, 8
    watch = _Load()
    overhead = _Overhead(engine, plain=known is None, sampled=sampled, drafted=drafted)
    overhead.measure()
    benches = [
        _Bench(target, timed, length, widths, counts, sampled=sampled and length == lengths[-1])
        for length in lengths
    ]
    try:
        done = 0
        while True:
            began = time.perf_counter()
            for bench in benches:
                bench.turn()
            done += 1
            if done == 1 and turns > 2:  # short runs of their own, dear beside the passes
                overhead.measure()
            now = time.perf_counter()
            told("passes of target and draft", min(1.0, (now - started) / max(seconds, 1e-9)))
            if done >= turns and now - started + (now - began) > seconds:
                break
    finally:
        for bench in benches:
            bench.close()
    for bench in benches if done > 2 else ():
        bench.drop_first()  # first passes also pay for memory
    profile = Profile(
        target=_target_profile(target, benches, overhead) if known is None else known.target,
        draft=None if timed is None else _draft_profile(engine, benches, overhead),
        quiet=watch.quiet(benches[0].passes[1]) if widths or known is None else known.quiet,
        memory=psutil.Process().memory_info().rss,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if keep:
        save_profile(profile, target, engine.drafter)
        if known is None:
            save_profile(without_draft(profile), target)  # other drafts start from these costs
    return profile


def _target_profile(
    target: LanguageModel, benches: list[_Bench], overhead: _Overhead
) -> TargetProfile:
    return TargetProfile(
        facts=model_facts(target),
        verify={b.length: _timings(b.passes) for b in benches},
        overhead=Timing.of(overhead.plain),
        logits={b.length: _timings(b.logits) for b in benches if b.logits},
        sampling=max(0.0, min(overhead.sampled, default=0.0) - min(overhead.plain)),
        read=min(b.target_read for b in benches),
    )


def _draft_profile(engine: Engine, benches: list[_Bench], overhead: _Overhead) -> DraftProfile:
    first = benches[0]
    return DraftProfile(
        facts=draft_facts(engine.drafter),
        draft={b.length: {k: Timing.of(s) for k, s in b.calls.items()} for b in benches},
        passes={k: sum(n) / len(n) for k, n in first.passes_of_calls.items()},
        step={b.length: Timing.of(b.steps) for b in benches if b.steps},
        retokenise=Timing.of(first.beside).median,
        read=min(b.draft_read for b in benches),
        overhead=Timing.of(overhead.drafted) if overhead.drafted else NOT_MEASURED,
    )


def _timed_drafter(engine: Engine) -> tuple[Drafter, TimedModel | None] | None:
    if engine.drafter is None:
        return None
    model = getattr(engine.drafter, "model", None)
    if model is None:
        return engine.drafter, None
    timed = TimedModel(model)
    drafter: Any = copy(engine.drafter)  # with its settings and tables
    drafter.model = timed
    return drafter, timed


class _Overhead:
    """Everything in a round but the passes, from short real runs.

    Args:
        plain, sampled, drafted: whether plain decoding, greedy and at temperature 1, and drafting
            are measured.
    """

    def __init__(self, engine: Engine, *, plain: bool, sampled: bool, drafted: bool) -> None:
        self.plain: list[float] = []
        self.sampled: list[float] = []
        self.drafted: list[float] = []
        self._engine = engine
        self._runs: list[tuple[list[float], dict[str, Any]]] = []
        if plain:
            self._runs.append((self.plain, {"num_draft_tokens": 0}))
        if sampled:
            fields = {"num_draft_tokens": 0, "temperature": 1.0, "seed": 1}
            self._runs.append((self.sampled, fields))
        if drafted and engine.drafter is not None:
            self._runs.append((self.drafted, {"num_draft_tokens": 2}))

    def measure(self) -> None:
        ids = self._engine.vocabulary.encode_prompt(TEXT[:60])
        for found, fields in self._runs:
            got = self._engine.generate(ids, max_tokens=6, ignore_eos=True, **fields)
            found.append(got.stats.overhead_seconds / got.stats.rounds)


class _Bench:
    """Passes and draft calls at one context length."""

    def __init__(
        self,
        target: LanguageModel,
        timed: tuple[Drafter, TimedModel | None] | None,
        length: int,
        widths: Sequence[int],
        counts: Sequence[int],
        *,
        sampled: bool,
    ) -> None:
        self.length = length
        self.passes: dict[int, list[float]] = {n: [] for n in widths}
        # Greedy requests may do without logits; then passes with them are measured as well.
        self._greedy = isinstance(target, GreedyModel)
        with_logits = {1, *(n for n in widths if n - 1 in counts)}
        self.logits: dict[int, list[float]] = {
            n: [] for n in sorted(with_logits) if sampled and self._greedy
        }
        self.calls: dict[int, list[float]] = {k: [] for k in counts if timed is not None}
        self.passes_of_calls: dict[int, list[int]] = {k: [] for k in self.calls}
        self.steps: list[float] = []
        self.beside: list[float] = []
        self.target_read = self.draft_read = 0.0
        self._target = target
        self._ids = _ids(target, length + _NEARBY + 2)
        self._source = random.Random(length)
        self._state = target.new_state()
        if widths:
            started = time.perf_counter()
            target.extend([(self._state, self._ids[:length], 0)])
            self.target_read = (time.perf_counter() - started) / length
        self._drafter = timed[0] if timed else None
        self._model = timed[1] if timed else None
        self._session: Any = None
        self._text = self._ids[:length]
        if self._drafter is not None:
            context = DraftContext(self._ids[:length], SamplingParams())
            self._session = self._drafter.new_session(context)
            started = time.perf_counter()
            first = self._drafter.draft([(self._session, self._text, 1)])[0]
            self.draft_read = (time.perf_counter() - started) / length
            self._go_on(first.token_ids)

    def turn(self) -> None:
        """Every width once, in a new order, each K's draft call before its pass."""
        # Plain decoding is what all is compared with: it is measured more often.
        order = [*self.passes, 1, 1] if self.passes else []
        self._source.shuffle(order)
        for width in order:
            if width - 1 in self.calls:
                self._draft(width - 1)
            self.passes[width].append(self._pass(width, greedy=self._greedy))
        for count in self.calls:
            if count + 1 not in self.passes:
                self._draft(count)
        for width, found in self.logits.items():
            found.append(self._pass(width, greedy=False))

    def drop_first(self) -> None:
        """Forget the first turn."""
        del self.passes.get(1, [])[:2]  # it was in each turn three times
        for table in (self.passes, self.logits, self.calls):
            for seconds in table.values():
                del seconds[:1]

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

    def _draft(self, count: int) -> None:
        assert self._drafter is not None
        before, model = passes_of(self._session), self._model
        if model is not None:
            model.passes.clear()
        started = time.perf_counter()
        draft = self._drafter.draft([(self._session, self._text, count)])[0]
        took = time.perf_counter() - started
        self._go_on(draft.token_ids)
        self.calls[count].append(took)
        self.passes_of_calls[count].append(passes_of(self._session) - before)
        self.beside.append(took - (0.0 if model is None else model.seconds))
        if model is not None:
            self.steps += [one.seconds for one in model.passes if one.tokens == 1]

    def _go_on(self, drafted: Sequence[int]) -> None:
        """The text goes on as after a round whose second candidate was rejected.

        What was drafted is then of no use in the next call, which has to pay for all it drafts.
        """
        if len(self._text) >= self.length + _NEARBY:
            self._text = self._ids[: self.length]
            return
        ahead = self._ids[len(self._text) :]
        if set(drafted[:1]) & self._target.vocabulary.eos_ids:
            drafted = []  # a text that has ended is not gone on with
        rejected = drafted[1] if len(drafted) > 1 else -1
        said = next(token_id for token_id in [*ahead[1:], *self._ids] if token_id != rejected)
        self._text = [*self._text, *(drafted[:1] or ahead[:1]), said]

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
