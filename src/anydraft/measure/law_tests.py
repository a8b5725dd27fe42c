"""Part two of the laboratory: do sampled tokens follow the target's exact law?

The real loop and the real drafters draw again and again at fixed prefixes, behind models that
remember their rows, so that ten thousands of draws cost seconds. Every draw has a key of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydraft.engine import Engine, Generation
from anydraft.measure.exact import (
    END,
    ONE,
    OPEN,
    TWO,
    Cells,
    PrefixLaw,
    Setting,
    make_cells,
    prefix_law,
)
from anydraft.measure.faults import FIRST, PAIR, Fault, from_error
from anydraft.measure.gtest import GTest, detectable_variation, g_test, holm, pool
from anydraft.measure.law_memory import LawMemory
from anydraft.measure.replay import Replay
from anydraft.sampling import PADDING
from anydraft.vocabulary import Vocabulary

BATCH = 48
"""Draws that go through the loop side by side."""
FIRST_CELLS = 5
PAIR_CELLS = 5
SCREEN = 0.05
"""Adjusted p-value below which a test is repeated with fresh draws, twice as many."""
CONFIRM = 0.001
"""Adjusted p-value of the repetition below which it is a violation."""


@dataclass(frozen=True, slots=True)
class LawPlan:
    """How much is drawn, per mode.

    Attributes:
        prefixes: how many.
        draws: at each, under ONE, TWO and OPEN.
        open_prefixes: at how many of them OPEN is drawn from, too.
    """

    prefixes: int
    draws: tuple[int, int, int]
    open_prefixes: int

    def doubled(self) -> LawPlan:
        one, two, untruncated = self.draws
        return LawPlan(self.prefixes, (2 * one, 2 * two, 2 * untruncated), self.open_prefixes)


@dataclass(slots=True)
class ModeLaw:
    """The tests of one mode.

    Attributes:
        mode: e.g. "tli+rejection", or "plain".
        first, pair: one test per prefix and setting.
        accepted, drafted: first candidates.
        bonus, after_rejection: second tokens after an accepted first token, and after another one;
            each given the first.
        worst: per kind the cell that was farthest off, in words.
    """

    mode: str
    first: list[GTest] = field(default_factory=list)
    pair: list[GTest] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    bonus: list[GTest] = field(default_factory=list)
    after_rejection: list[GTest] = field(default_factory=list)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    fault: Fault | None = None

    def of_kind(self, kind: str) -> list[GTest]:
        return self.first if kind == FIRST else self.pair

    def detectable(self, kind: str, alpha: float) -> float:
        """Smallest total variation that the pooled test of a kind surely sees, at power 0.8."""
        pooled = pool(self.of_kind(kind))
        return detectable_variation(pooled.draws, pooled.df, alpha)


@dataclass(slots=True)
class Seen:
    """Outcomes of one mode at one prefix: first tokens, pairs, and pairs with one token drafted,
    split by whether the first token was the draft's."""

    firsts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    pairs: Counter[tuple[int, ...]] = field(default_factory=Counter)
    split: tuple[Counter[tuple[int, int]], ...] = field(
        default_factory=lambda: (Counter(), Counter())
    )

    def add(self, count: int, generations: Sequence[Generation], result: ModeLaw) -> None:
        """Count a batch, drawn with so many draft tokens.

        Raises:
            RuntimeError: the draft failed, so that these draws say nothing about the mode.
        """
        for got in generations:
            if got.stats.draft_error is not None:
                raise RuntimeError(f"the draft gave up: {got.stats.draft_error}")
            one, two = got.token_ids[0], (got.token_ids[1] if len(got.token_ids) > 1 else END)
            self.firsts[one,] += 1
            self.pairs[one, two] += 1
            if count == 1:
                self.split[got.from_draft[0]][one, two] += 1
            result.drafted += bool(got.stats.drafted_at and got.stats.drafted_at[0])
            result.accepted += bool(got.stats.accepted_at and got.stats.accepted_at[0])


class LawLab:
    """Draws by several modes at the same prefixes.

    Args:
        target: remembers the real target's rows.
        engines: mode -> engine over that target (and a draft that remembers).
        draftable: (vocab,) whether the draft can propose an id; None without a draft. Ids that it
            cannot propose are counted apart.
        seed: first of the seeds; every batch of draws has one of its own.
    """

    def __init__(
        self,
        target: Replay,
        engines: dict[str, Engine],
        draftable: Sequence[bool] | None = None,
        seed: int = 0,
    ) -> None:
        self.target = target
        self._engines = engines
        self._strata = None if draftable is None else np.where(draftable, 0, 1)
        kinds = np.asarray(target.vocabulary.kinds)
        self.forbidden = np.flatnonzero(kinds == PADDING).tolist()
        self._seed = seed
        self._known: tuple[Any, PrefixLaw] | None = None

    def run(
        self,
        prefixes: Sequence[Sequence[int]],
        plan: LawPlan,
        modes: Sequence[str],
        after_prefix: Callable[[], None] = lambda: None,
        time_is_up: Callable[[], bool] = lambda: False,
    ) -> dict[str, ModeLaw]:
        """Test the modes at as many prefixes as the plan says and time allows.

        Modes take turns, so that all have the same number of draws when time is up. However little
        time there is, each has a batch of draws under ONE at the first prefix.
        """
        found = {mode: ModeLaw(mode) for mode in modes}
        with LawMemory():
            for number, prefix in enumerate(prefixes[: plan.prefixes]):
                if number and time_is_up():
                    break
                for setting, draws in zip((ONE, TWO, OPEN), plan.draws, strict=True):
                    if setting is not ONE and time_is_up():
                        break
                    if setting is not OPEN or number < plan.open_prefixes:
                        self._at(prefix, setting, draws, found, time_is_up)
                for engine in self._engines.values():
                    _forget(engine)
                after_prefix()
        return found

    def _at(
        self,
        prefix: Sequence[int],
        setting: Setting,
        draws: int,
        found: dict[str, ModeLaw],
        time_is_up: Callable[[], bool],
    ) -> None:
        """All modes at one prefix: draw in turns, then test."""
        seen = {mode: Seen() for mode in found}
        for start in range(0, draws, BATCH):
            if start and time_is_up():
                break
            for mode, result in found.items():
                if result.fault is not None:
                    continue
                try:
                    got = self.draw(mode, prefix, setting, min(BATCH, draws - start))
                    seen[mode].add(setting.count, got, result)
                except Exception as error:
                    result.fault = from_error(error, mode, f"drawing with {setting.name}")
        law = self._law(prefix, setting)
        cells: dict[int, tuple[Cells, Cells | None]] = {}
        for mode, result in found.items():
            size = seen[mode].firsts.total()
            if result.fault is None and size:
                if size not in cells:
                    cells[size] = self.cells(law, size)
                self._test(seen[mode], law, *cells[size], result)

    def _law(self, prefix: Sequence[int], setting: Setting) -> PrefixLaw:
        """The exact law; settings that differ in the draft alone share it."""
        key = tuple(prefix), setting.temperature, setting.top_k, setting.pair
        if self._known is None or self._known[0] != key:
            self._known = key, prefix_law(self.target, prefix, setting, self.forbidden)
        return self._known[1]

    def draw(
        self, mode: str, prefix: Sequence[int], setting: Setting, size: int
    ) -> list[Generation]:
        """A batch of draws with a seed that was not used before."""
        self._seed += 1
        got = self._engines[mode].generate(
            list(prefix),
            n=size,
            seed=self._seed,
            max_tokens=setting.count + 1,
            temperature=setting.temperature,
            top_k=setting.top_k,
            num_draft_tokens=setting.count,
        )
        return got if isinstance(got, list) else [got]

    def cells(self, law: PrefixLaw, draws: int) -> tuple[Cells, Cells | None]:
        """How first tokens and pairs are merged for so many draws."""
        possible = np.flatnonzero(law.first)
        strata = None if self._strata is None else self._strata[possible].tolist()
        names = [(int(i),) for i in possible]
        first = make_cells(names, law.first[possible], draws, FIRST_CELLS, strata)
        if not law.pairs:
            return first, None
        # First tokens stay apart, so that what follows one of them is seen by itself.
        probs = np.fromiter(law.pairs.values(), np.float64)
        rank = {int(i): n for n, i in enumerate(np.argsort(-law.first, kind="stable")[:64])}
        strata = [rank.get(one, 64) for one, _ in law.pairs]
        return first, make_cells(list(law.pairs), probs, draws, PAIR_CELLS, strata)

    def _test(
        self, seen: Seen, law: PrefixLaw, first: Cells, pair: Cells | None, result: ModeLaw
    ) -> None:
        """One mode's outcomes at one prefix against the law."""
        result.first.append(first.test(seen.firsts))
        self._note(result, FIRST, first, seen.firsts)
        if pair is not None:
            result.pair.append(pair.test(seen.pairs))
            self._note(result, PAIR, pair, seen.pairs)
            result.after_rejection.append(_given_first(seen.split[0], law))
            result.bonus.append(_given_first(seen.split[1], law))

    def _note(
        self, result: ModeLaw, kind: str, cells: Cells, outcomes: dict[tuple[int, ...], int]
    ) -> None:
        """Remember the cell that is farthest off, in standard deviations."""
        counts = cells.count(outcomes)
        expected = counts.sum() * cells.law
        with np.errstate(divide="ignore", invalid="ignore"):
            off = (counts - expected) / np.sqrt(np.maximum(expected * (1 - cells.law), 1e-9))
        cell = int(np.abs(off).argmax())
        if abs(off[cell]) > result.worst.get(kind, (0.0, ""))[0]:
            what = _quoted(cells.sample[cell], self.target.vocabulary)
            words = f"{what} came {counts[cell]:.0f} times, {expected[cell]:.1f} were expected"
            result.worst[kind] = float(abs(off[cell])), words


def _forget(engine: Engine) -> None:
    """Drop the rows of a prefix that is done: a row of a large vocabulary is a megabyte."""
    for model in (engine.target, getattr(engine.drafter, "model", None)):
        if isinstance(model, Replay):
            model.forget()


def _given_first(pairs: Counter[tuple[int, int]], law: PrefixLaw) -> GTest:
    """Second tokens against their law given the first, pooled over first tokens."""
    tests = []
    for first in {one for one, _ in pairs}:
        second = law.second.get(first)
        seconds: dict[tuple[int, ...], int] = {
            (two,): n for (one, two), n in pairs.items() if one == first
        }
        draws = sum(seconds.values())
        if second is None or draws < 20:
            continue
        possible = np.flatnonzero(second)
        cells = make_cells([(int(i),) for i in possible], second[possible], draws, PAIR_CELLS)
        tests.append(cells.test(seconds))
    return pool(tests) if tests else g_test([], [])


def _quoted(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    if not token_ids:
        return "what the target never says"
    data = b"".join(vocabulary.token_bytes[i] or b"" for i in token_ids if i != END)
    more = "" if len(token_ids) > 1 else " and the like"
    return f"{data.decode('utf-8', 'replace')!r}{more}"


def suspects(results: dict[str, ModeLaw]) -> dict[tuple[str, str], float]:
    """(mode, kind) -> adjusted p-value: the smaller of its pooled test's and its worst prefix's.

    Pooled tests are one family of hypotheses, prefixes another; each is adjusted by Holm's method.
    """
    keys = [(mode, kind) for mode in results for kind in (FIRST, PAIR)]
    keys = [key for key in keys if results[key[0]].of_kind(key[1])]
    pooled = holm([pool(results[mode].of_kind(kind)).p_value for mode, kind in keys])
    owners = [key for key in keys for _ in results[key[0]].of_kind(key[1])]
    each = holm([t.p_value for mode, kind in keys for t in results[mode].of_kind(kind)])
    found = {key: min(1.0, 2 * p) for key, p in zip(keys, pooled, strict=True)}
    for key, p in zip(owners, each, strict=True):
        found[key] = min(found[key], 2 * p)
    return found


def law_faults(results: dict[str, ModeLaw]) -> list[Fault]:
    """Violations of confirmed results, and what failed."""
    faults = [result.fault for result in results.values() if result.fault is not None]
    for (mode, kind), p in suspects(results).items():
        if p >= CONFIRM:
            continue
        result = results[mode]
        words = f"p = {p:.1e}; {result.worst.get(kind, (0.0, 'nothing stands out'))[1]}"
        first_right = pool(result.first).p_value >= CONFIRM
        if kind == PAIR and first_right and result.drafted:
            words += f"; {_where(result)}"
        faults.append(Fault(kind, mode, words))
    return faults


def _where(result: ModeLaw) -> str:
    """Which second tokens are wrong, given the first."""
    wrong = [
        name
        for name, tests in (
            ("after an accepted token (the bonus)", result.bonus),
            ("after a rejection", result.after_rejection),
        )
        if tests and pool(tests).p_value < CONFIRM
    ]
    return f"wrong {' and '.join(wrong)}" if wrong else "wrong with more than one token drafted"
