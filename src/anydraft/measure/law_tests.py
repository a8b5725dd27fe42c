"""Part two of the laboratory: do sampled tokens follow the target's exact law?

The real loop and the real drafters draw again and again at fixed prefixes, behind models that
remember their rows, so that ten thousands of draws cost seconds. Every draw has a key of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from anydraft.engine import Engine, Generation
from anydraft.measure.exact import END, OPEN, TOP, Cells, PrefixLaw, Setting, make_cells, prefix_law
from anydraft.measure.faults import FIRST, PAIR, Fault, from_error
from anydraft.measure.gtest import GTest, detectable_variation, g_test, holm, pool
from anydraft.measure.law_memory import LawMemory
from anydraft.measure.replay import Replay
from anydraft.sampling import PADDING
from anydraft.vocabulary import Vocabulary

BATCH = 48
"""Draws that go through the loop side by side."""
FIRST_CELLS = 5
PAIR_CELLS = 6
SCREEN = 0.05
"""Adjusted p-value below which a test is repeated with fresh draws, twice as many."""
CONFIRM = 0.001
"""Adjusted p-value of the repetition below which it is a violation."""


@dataclass(frozen=True, slots=True)
class LawPlan:
    """How much is drawn, per mode.

    Attributes:
        prefixes, draws: under the truncated setting; first tokens and pairs.
        open_prefixes, open_draws: without truncation; first tokens only.
    """

    prefixes: int
    draws: int
    open_prefixes: int
    open_draws: int

    def doubled(self) -> LawPlan:
        return LawPlan(self.prefixes, 2 * self.draws, self.open_prefixes, 2 * self.open_draws)


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
        self._target = target
        self._engines = engines
        self._strata = None if draftable is None else np.where(draftable, 0, 1)
        kinds = np.asarray(target.vocabulary.kinds)
        self._forbidden = np.flatnonzero(kinds == PADDING).tolist()
        self._seed = seed

    def run(
        self,
        prefixes: Sequence[Sequence[int]],
        plan: LawPlan,
        modes: Sequence[str],
        after_prefix: Callable[[], None] = lambda: None,
        time_is_up: Callable[[], bool] = lambda: False,
    ) -> dict[str, ModeLaw]:
        """Test the modes at as many prefixes as the plan says and time allows, at least one."""
        found = {mode: ModeLaw(mode) for mode in modes}
        with LawMemory():
            for number, prefix in enumerate(prefixes[: plan.prefixes]):
                if number and time_is_up():
                    break
                self._at(prefix, TOP, plan.draws, found)
                if number < plan.open_prefixes:
                    self._at(prefix, OPEN, plan.open_draws, found)
                for engine in self._engines.values():
                    _forget(engine)
                after_prefix()
        return found

    def _at(
        self, prefix: Sequence[int], setting: Setting, draws: int, found: dict[str, ModeLaw]
    ) -> None:
        """All modes at one prefix."""
        if draws <= 0:
            return
        law = prefix_law(self._target, prefix, setting, self._forbidden)
        possible = np.flatnonzero(law.first)
        first = make_cells(
            [(int(i),) for i in possible],
            law.first[possible],
            draws,
            FIRST_CELLS,
            None if self._strata is None else self._strata[possible].tolist(),
        )
        pair = None
        if law.pairs:
            pair = make_cells(
                list(law.pairs), np.fromiter(law.pairs.values(), np.float64), draws, PAIR_CELLS
            )
        for mode, result in found.items():
            if result.fault is not None:
                continue
            try:
                self._count(mode, prefix, setting, draws, law, first, pair, result)
            except Exception as error:
                result.fault = from_error(error, mode, f"drawing with {setting.name}")

    def _count(
        self,
        mode: str,
        prefix: Sequence[int],
        setting: Setting,
        draws: int,
        law: PrefixLaw,
        first: Cells,
        pair: Cells | None,
        result: ModeLaw,
    ) -> None:
        """One mode at one prefix."""
        firsts: Counter[tuple[int, ...]] = Counter()
        pairs: Counter[tuple[int, ...]] = Counter()
        split: tuple[Counter[tuple[int, int]], ...] = (Counter(), Counter())
        for count, got in self._draws(mode, prefix, setting, draws):
            ids = got.token_ids
            one, two = ids[0], (ids[1] if len(ids) > 1 else END)
            firsts[one,] += 1
            pairs[one, two] += 1
            if count == 1:
                split[got.from_draft[0]][one, two] += 1
            result.drafted += bool(got.stats.drafted_at and got.stats.drafted_at[0])
            result.accepted += bool(got.stats.accepted_at and got.stats.accepted_at[0])
            if got.stats.draft_error is not None:
                raise RuntimeError(f"the draft gave up: {got.stats.draft_error}")
        result.first.append(first.test(firsts))
        self._note(result, FIRST, first, firsts)
        if pair is not None:
            result.pair.append(pair.test(pairs))
            self._note(result, PAIR, pair, pairs)
            result.after_rejection.append(_given_first(split[0], law))
            result.bonus.append(_given_first(split[1], law))

    def _draws(
        self, mode: str, prefix: Sequence[int], setting: Setting, draws: int
    ) -> Iterator[tuple[int, Generation]]:
        engine = self._engines[mode]
        left, turn = draws, 0
        while left > 0:
            count = setting.counts[turn % len(setting.counts)]
            size = min(BATCH, left)
            self._seed += 1
            got = engine.generate(
                list(prefix),
                n=size,
                seed=self._seed,
                max_tokens=count + 1,
                temperature=setting.temperature,
                top_k=setting.top_k,
                num_draft_tokens=count,
            )
            for generation in got if isinstance(got, list) else [got]:
                yield count, generation
            left, turn = left - size, turn + 1

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
            what = _quoted(cells.sample[cell], self._target.vocabulary)
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
