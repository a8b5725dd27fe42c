"""Is what was said with a draft what the target says alone? The check, and what is a near-tie.

In exact arithmetic the answer is always yes. In floating point a pass over several tokens may round
differently from a pass over one, so two tokens that are almost equally good may change places. Such
a difference is a near-tie, and admissible, only if moving each logit by at most `bound` makes both
tokens possible, truncation thresholds included. `bound` belongs to that position: twice the largest
difference between its logits in passes over one token and in wider ones, over this very text, or
the typical one of the text where that is larger. Anything else is a violation: a bug.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anydraft.engine import Engine, Generation, GenerationRequest
from anydraft.model import LanguageModel
from anydraft.noise import Noise, advance, draw, gap_among_rest, token_keys
from anydraft.sampling import Sampler

WIDTHS = (2, 4, 9)
"""Rows of the wide passes that rounding is measured with; the last ones take the prompt apart."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One position where teacher-forced plain decoding says another token.

    Attributes:
        position: index in the output.
        plain_id, emitted_id: what plain decoding says there, and what was emitted.
        gap: a move of every logit, up to the bound, that makes the emitted token possible: the
            smallest that was found, so an upper limit; infinity where the bound does not do.
        bound: the largest move that is admissible here.
    """

    position: int
    plain_id: int
    emitted_id: int
    gap: float
    bound: float


@dataclass(frozen=True, slots=True)
class TeacherForced:
    """What plain decoding says of a text that was emitted, position by position.

    Attributes:
        tokens: positions looked at.
        bound: the largest of the positions' bounds.
        near_ties, violations: where plain decoding says another token, within the bound or not.
    """

    tokens: int
    bound: float
    near_ties: tuple[Difference, ...]
    violations: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class IdentityReport:
    """The verdict on one generation.

    Attributes:
        identical: the same tokens as a plain run.
        near_ties: differences within their bounds.
        violations: differences beyond them.
        bound: the largest bound of these, or, if there are none, of all positions.
        first_difference: output index where a plain run went another way; None if it did not.
    """

    identical: bool
    near_ties: tuple[Difference, ...]
    violations: tuple[Difference, ...]
    bound: float
    first_difference: int | None

    @property
    def passed(self) -> bool:
        return not self.violations

    def summary(self) -> str:
        """One line in words."""
        if self.identical:
            return "identical: yes, token for token"
        where = f"from output token {self.first_difference} on"
        if self.passed and not self.near_ties:
            # The plain run met with another order of its cache, and took the near-tie itself.
            return f"identical: no, {where}, but token for token what plain passes over it say"
        if self.passed:
            gap = max(d.gap for d in self.near_ties)
            return (
                f"identical: no, {where}, but only by {len(self.near_ties)} near-tie(s): moving "
                f"logits by {gap:.1e} decides (rounding moves them by up to {self.bound / 2:.1e})"
            )
        return f"identical: NO, {where}; this is a bug, not rounding (bound {self.bound:.1e})"


def compare_with_plain(
    engine: Engine,
    generation: Generation,
    request: GenerationRequest,
    plain: Generation | None = None,
) -> IdentityReport:
    """Check one generation against plain decoding of the same request and seed.

    Args:
        engine: whose target is meant.
        generation: what was emitted for `request` (one prompt; `choice` says which of n).
        plain: the plain run, if there is one already; else it is run here.
    """
    if plain is None:
        plain = run_plain(engine, generation, request)
    pairs = zip(plain.token_ids, generation.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(plain.token_ids) != len(generation.token_ids):
        first = min(len(plain.token_ids), len(generation.token_ids))
    if first is None:
        return IdentityReport(True, (), (), 0.0, None)
    forced = teacher_force(engine, generation, request)
    differences = (*forced.near_ties, *forced.violations)
    return IdentityReport(
        identical=False,
        near_ties=forced.near_ties,
        violations=forced.violations,
        bound=max((d.bound for d in differences), default=forced.bound),
        first_difference=first,
    )


def teacher_force(
    engine: Engine, generation: Generation, request: GenerationRequest
) -> TeacherForced:
    """Put an emitted text through the plain path, and compare token by token.

    Args:
        engine: whose target is meant.
        generation: what was emitted for `request`, by a seed-identical mode; at least one token.
    """
    prompt = engine.encode(request)
    narrow, bounds = _rows(engine.target, prompt, generation.token_ids)
    differences = _differences(engine, request, generation, prompt, narrow, bounds)
    return TeacherForced(
        tokens=len(generation.token_ids),
        bound=max(bounds),
        near_ties=tuple(d for d in differences if d.gap <= d.bound),
        violations=tuple(d for d in differences if d.gap > d.bound),
    )


def run_plain(engine: Engine, generation: Generation, request: GenerationRequest) -> Generation:
    """The same request and seed without a draft."""
    from dataclasses import fields

    values: dict[str, Any] = {f.name: getattr(request, f.name) for f in fields(request)}
    values.update(seed=generation.seed, n=max(request.n, 1), num_draft_tokens=0)
    prompt = values.pop("prompt")
    result = engine.plain().generate(prompt, **values)
    plain: Generation = result[generation.choice] if isinstance(result, list) else result
    return plain


def _rows(
    target: LanguageModel, prompt: Sequence[int], output: Sequence[int]
) -> tuple[list[torch.Tensor], list[float]]:
    """Logits for every output token from passes of one token each, and how far each row may move.

    The wider passes are what drafted runs consist of: several tokens at a time after the prompt's
    own pass, or, where other sequences take part, cells in another order and a prompt in pieces.
    """
    tokens = [*prompt, *output[:-1]]
    state, other = target.new_state(), target.new_state()
    try:
        narrow = _one_by_one(target.extend([(state, list(prompt), 1)]))
        for token_id in tokens[len(prompt) :]:
            narrow += _one_by_one(target.extend([(state, [token_id], 1)]))
        moved = [0.0] * len(narrow)
        for width in WIDTHS[:-1]:
            state.rollback(len(prompt))
            wide = narrow[:1]
            for start in range(len(prompt), len(tokens), width):
                new = tokens[start : start + width]
                wide = wide + _one_by_one(target.extend([(state, new, len(new))]))
            moved = _larger(moved, narrow, wide)
        state.rollback(0)
        # Its ids differ from the start, so that no runtime takes the two for one.
        target.extend([(other, [*prompt[1:], *prompt[:1]], 0)])
        wide = []
        for start in range(0, len(tokens), width := WIDTHS[-1]):
            new = tokens[start : start + width]
            wanted = min(len(new), start + len(new) - len(prompt) + 1)
            wide += _one_by_one(target.extend([(state, new, max(0, wanted))]))
            if start + width >= len(prompt):
                other.rollback(0)
        moved = _larger(moved, narrow, wide)
    finally:
        state.close()
        other.close()
    typical = statistics.median(moved)
    return narrow, [2 * max(size, typical) for size in moved]


def _one_by_one(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row.float().cpu() for block in blocks for row in block]


def _larger(
    moved: list[float], narrow: list[torch.Tensor], wide: list[torch.Tensor]
) -> list[float]:
    """The larger, row by row, of `moved` and the largest difference between two rows."""
    rows = zip(moved, narrow, wide, strict=True)
    return [max(before, float((a - b).abs().max())) for before, a, b in rows]


def _differences(
    engine: Engine,
    request: GenerationRequest,
    generation: Generation,
    prompt: list[int],
    rows: list[torch.Tensor],
    bounds: list[float],
) -> list[Difference]:
    vocabulary = engine.vocabulary
    params = request.sampling()
    sampler = Sampler(params, vocabulary, len(prompt))
    noise = None if params.greedy else Noise(generation.seed or 0, generation.choice, prompt)
    keys = token_keys(vocabulary)
    tokens = list(prompt)
    position = 0
    found: list[Difference] = []
    for index, emitted in enumerate(generation.token_ids):

        def drawn(row: torch.Tensor, position: int = position) -> int:
            return draw(sampler.law(row, tokens), noise, position, keys)

        own = drawn(rows[index])
        if own != emitted:
            gap = _smallest_move(rows[index], own, emitted, drawn, bounds[index])
            if math.isinf(gap) and noise is not None:
                law = sampler.law(rows[index], tokens)
                moved = params.temperature * gap_among_rest(law, noise, position, keys, emitted)
                gap = moved if moved <= bounds[index] else gap
            found.append(Difference(index, own, emitted, gap, bounds[index]))
        tokens.append(emitted)
        position = advance(position, vocabulary.token_bytes[emitted])
    return found


def _smallest_move(row: torch.Tensor, own: int, emitted: int, drawn: Any, bound: float) -> float:
    """The smallest move, up to `bound`, after which the emitted token is drawn; else infinity.

    The moves tried are those that help it most: itself up and all others down, its rival down and
    all others up (a rival may drop out at a truncation threshold), or only the two of them.
    """

    def possible(size: float) -> bool:
        for others in (-size, size, 0.0):
            moved = row + others
            moved[own] = row[own] - size
            moved[emitted] = row[emitted] + size
            if drawn(moved) == emitted:
                return True
        return False

    if not possible(bound):
        return math.inf
    low, high = 0.0, bound
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high
