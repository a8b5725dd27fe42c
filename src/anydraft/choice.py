"""Which way to draft and verify, from what a pair does on a short text.

Both models read the text once. At some of its positions the draft's law by each proposal law is
compared with the target's: the sum of the smaller of the two is what `rejection` accepts, and a sum
of the same kind is what keyed draws agree on. With the measured times of a draft step, of the
target's pass and of the arithmetic between them this gives tokens per second for each method.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from anydraft.drafter import DraftContext, Drafter, DraftLaw
from anydraft.methods import MATCH, Method, offered
from anydraft.model import LanguageModel
from anydraft.noise import Noise, draw, token_keys
from anydraft.sampling import Sampler, SamplingParams
from anydraft.verify import VERIFICATIONS

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

TEXT = (
    b"The lighthouse keeper wrote one line in the log every evening: the wind, the sea, and the "
    b"ships that passed. In 1871 there were 214 of them.\n\n"
    b"def mean(values):\n    return sum(values) / len(values)\n\n"
    b"A good answer is short, and says what was measured."
)
SKIP = 6
STRIDE = 4
MARGIN = 1.02
"""What another method has to gain over match, whose answers can be repeated by their seed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One method on this pair.

    Attributes:
        acceptance: of the first candidate.
        tokens_per_round: expected, if later candidates are accepted as often.
        tokens_per_second: with the measured times.
    """

    method: Method
    acceptance: float
    tokens_per_round: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        overlap: mean probability that the draft gives to tokens that are one of the target's too;
            None where both share one vocabulary, or nothing was measured.
        candidates: every method that was compared, best first.
        reason: in one sentence.
    """

    method: Method
    reason: str
    overlap: float | None = None
    candidates: list[Candidate] = field(default_factory=list)


@dataclass(slots=True)
class _Sums:
    """What was measured.

    Attributes:
        acceptance: by way: a proposal law, or "match".
        row_seconds: of arithmetic per row that is looked at, by verification.
        round_seconds: of arithmetic once per round, by method.
    """

    acceptance: dict[str, list[float]] = field(default_factory=dict)
    row_seconds: dict[str, list[float]] = field(default_factory=dict)
    round_seconds: dict[str, list[float]] = field(default_factory=dict)
    draft_seconds: list[float] = field(default_factory=list)
    target_seconds: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)

    def add(self, kind: dict[str, list[float]], way: str, value: float) -> None:
        kind.setdefault(way, []).append(value)


def choose(
    target: LanguageModel,
    drafter: Drafter,
    sampling: SamplingParams,
    num_draft_tokens: int,
    clock: Callable[[], float],
) -> Choice:
    """Measure a pair under a sampling setting; takes a second or so on a CPU.

    Args:
        sampling: temperature and truncation count; what names ids or the text is left out.
        num_draft_tokens: K.
        clock: seconds.
    """
    sampling = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    methods = [m for m in offered(getattr(drafter, "laws", {})) if m.law not in ("union", "slrs")]
    if len(methods) == 1 or num_draft_tokens == 0:
        return Choice(MATCH, f"{drafter.name} drafts have no probabilities, so only match applies")
    ids = target.vocabulary.encode_prompt(TEXT)
    if len(ids) < SKIP + 4 * STRIDE:
        return Choice(MATCH, "the vocabulary cannot spell the text that methods are compared on")
    try:
        sums = _Measurement(target, drafter, sampling, num_draft_tokens, clock).run(ids, methods)
    except Exception as error:  # a choice is a convenience: the answer comes without it
        log.warning("methods could not be compared: %s", error, exc_info=True)
        return Choice(MATCH, f"the others could not be measured ({type(error).__name__}: {error})")
    return _best(sums, methods, num_draft_tokens)


class _Measurement:
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        sampling: SamplingParams,
        num_draft_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.num_draft_tokens, self.clock = num_draft_tokens, clock
        self.sampler = Sampler(sampling, target.vocabulary, 0)
        self.sums = _Sums()

    def run(self, ids: list[int], methods: Sequence[Method]) -> _Sums:
        laws = sorted({m.law for m in methods if m.law is not None})
        across = getattr(self.drafter, "laws", {}).get("union") == ""
        noise = Noise(0, 0, ids)
        names = [*laws, *["union"] * across]
        sessions = {
            law: self.drafter.new_session(DraftContext(ids[:1], self.sampling, noise, law=law))
            for law in names
        }
        state = self.target.new_state()
        try:
            rows = self.target.extend([(state, ids, len(ids))])[0]
            for position in range(SKIP, len(ids), STRIDE):
                self._at(ids[:position], rows[position - 1], sessions, noise)
            self._time_target(state, ids)
        finally:
            state.close()
            for session in sessions.values():
                session.close()
        return self.sums

    def _at(self, ids: list[int], row: torch.Tensor, sessions: Any, noise: Noise) -> None:
        """One position: acceptance and arithmetic of every way."""
        sums, started = self.sums, self.clock()
        law = self.sampler.law(row, ids)
        made = self.clock()
        draw(law, noise, len(ids), token_keys(self.target.vocabulary))
        drawn = self.clock()
        target_probs = law.array(self.target.vocab_size)
        sums.add(sums.row_seconds, "match", drawn - started)
        for verification in VERIFICATIONS:
            sums.add(sums.row_seconds, verification, made - started + self.clock() - drawn)
        agreed = 0.0
        for name, session in sessions.items():
            started = self.clock()
            draft = self.drafter.draft([(session, ids, 1)])[0]
            sums.draft_seconds.append(self.clock() - started)
            if not draft.laws:
                sums.add(sums.acceptance, name, 0.0)
                continue
            probs = draft.laws[0]
            if name == "union":
                sums.overlap.append(float(probs.probs.sum()))
                continue
            smaller = np.minimum(target_probs[probs.token_ids], probs.probs).sum()
            sums.add(sums.acceptance, name, float(smaller))
            if name != "tli":  # keyed draws know no renormalisation
                agreed = keyed_agreement(target_probs, probs)
            for verification in VERIFICATIONS:
                seconds = self._time_end(target_probs, draft.proposals[:1], probs, verification)
                sums.add(sums.round_seconds, f"{name}+{verification}", seconds)
        sums.add(sums.acceptance, "match", agreed)

    def _time_end(self, target: Any, proposals: Any, probs: DraftLaw, verification: str) -> float:
        """Seconds for what ends a round: the coins, and a draw from what a rejection leaves."""
        started = self.clock()
        plan = VERIFICATIONS[verification](proposals, [probs], [target, target])
        left = plan.laws[0]
        if left is not None:
            left.cumsum(dtype=np.float64)
        return self.clock() - started

    def _time_target(self, state: Any, ids: list[int]) -> None:
        for _ in range(3):
            state.rollback(max(0, len(ids) - self.num_draft_tokens - 1))
            new = ids[state.length :]
            started = self.clock()
            self.target.extend([(state, new, len(new))])
            self.sums.target_seconds.append(self.clock() - started)


def keyed_agreement(target_probs: Any, draft: DraftLaw) -> float:
    """Probability that two draws with one Gumbel noise agree: sum_i 1 / sum_j max(p_j/p_i, q_j/q_i)
    (Daliri, Musco and Suresh 2024, arXiv 2408.07978)."""
    p, q = target_probs[draft.token_ids], draft.probs
    common = (p > 0) & (q > 0)
    elsewhere = 1.0 - float(p.sum()), 1.0 - float(q.sum())
    only_p, only_q = float(p[~common].sum()), float(q[~common].sum())
    p, q = p[common], q[common]
    order = np.argsort(q / p)
    p, q = p[order], q[order]
    # Up to i the ratios q/p are no larger than i's, so the target's side is the larger one.
    target_side = p.cumsum() + only_p + elsewhere[0]
    draft_side = q.sum() - q.cumsum() + only_q + elsewhere[1]
    return float((1.0 / (target_side / p + draft_side / q)).sum())


def _best(sums: _Sums, methods: Sequence[Method], num_draft_tokens: int) -> Choice:
    step = statistics.median(sums.draft_seconds)
    verify = statistics.median(sums.target_seconds)
    candidates: list[Candidate] = []
    for method in methods:
        if method.verification == "block" and num_draft_tokens == 1:
            continue  # one token is a block of its own
        accepted = statistics.fmean(sums.acceptance.get(method.law or "match", [0.0]))
        tokens = sum(accepted**k for k in range(num_draft_tokens + 1))
        # Block needs the law of every row; the others stop at the first one that disagrees.
        rows = num_draft_tokens + 1 if method.verification == "block" else tokens
        seconds = num_draft_tokens * step + verify
        seconds += rows * statistics.median(sums.row_seconds[method.verification])
        seconds += statistics.median(sums.round_seconds.get(str(method), [0.0]))
        candidates.append(Candidate(method, accepted, tokens, tokens / seconds))
    # Of two verifications with one law block keeps at least as many tokens; by how much is not
    # seen here, so it goes first unless its arithmetic costs more than a percent.
    candidates.sort(key=lambda c: c.tokens_per_second * _block_bonus(c.method), reverse=True)
    match = next(c for c in candidates if c.method == MATCH)
    best = candidates[0]
    if best.tokens_per_second < MARGIN * match.tokens_per_second:
        best = match
    overlap = statistics.fmean(sums.overlap) if sums.overlap else None
    return Choice(best.method, _reason(best, candidates, overlap), overlap, candidates)


def _block_bonus(method: Method) -> float:
    return 1.01 if method.verification == "block" else 1.0


def _reason(best: Candidate, candidates: Sequence[Candidate], overlap: float | None) -> str:
    first: dict[str, float] = {}
    for candidate in candidates:
        first.setdefault(candidate.method.law or "match", candidate.acceptance)
    figures = ", ".join(f"{name} {value:.2f}" for name, value in first.items())
    match = next(c for c in candidates if c.method == MATCH)
    gain = best.tokens_per_second / match.tokens_per_second - 1
    why = (
        "nothing gains enough over it to give up seeds that repeat an answer"
        if best is match
        else f"about {100 * gain:.0f} % more tokens per second than match"
    )
    shared = "" if overlap is None else f"; {100 * overlap:.0f} % of the draft's probability shared"
    return f"{why} (first candidate accepted: {figures}{shared})"
