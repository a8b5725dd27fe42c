"""Builds of anydraft that are broken on purpose, for `anydraft verify` to find.

    ANYDRAFT_TEST_BROKEN="ratio inverted" python tests/broken_builds.py verify --target toy ...

runs the command line of a build with one fault in it, with toy models behind the names `toy`,
`cousin` (the target's vocabulary) and `stranger` (another one). The package knows nothing of this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from anydraft import decode, noise, sampling, verify
from anydraft.backends.toy import ToyModel, ToyState, random_logits
from anydraft.drafter import DraftLaw
from anydraft.drafters.proposal_laws import PieceTable
from anydraft.measure.faults import FIRST, IDENTITY, PAIR, ROLLBACK
from anydraft.vocabulary import Vocabulary
from cli_toys import LETTERS, WORDS, toy

VARIABLE = "ANYDRAFT_TEST_BROKEN"
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Broken:
    """One fault.

    Attributes:
        plant: puts it into the running package.
        kind: the diagnosis that `verify` must come to first.
        modes: the sampled modes that are run; "same" ones with the target's cousin.
        says: what the diagnosis must name.
        effort: how many times the usual draws it takes.
    """

    name: str
    plant: Callable[[Patch], None]
    kind: str
    modes: tuple[str, ...] = ("plain",)
    says: str = ""
    effort: int = 1

    @property
    def draft(self) -> str:
        return "cousin" if self.modes[0].startswith("same") else "stranger"


def dense(law: Any, size: int) -> Any:
    full = np.zeros(size)
    full[law.token_ids] = law.probs
    return full


# ---- the draft's law


def draft_law_off(patch: Patch) -> None:
    """The law that is handed over is flatter than the one drawn from."""
    original = PieceTable.proposals

    def proposals(self: Any, probs: Any, outcome: int) -> Any:
        ids, laws = original(self, probs, outcome)
        flat = [np.sqrt(law.probs) for law in laws]
        pairs = zip(laws, flat, strict=True)
        return ids, [DraftLaw(law.token_ids, f / f.sum() * law.probs.sum()) for law, f in pairs]

    patch.setattr(PieceTable, "proposals", proposals)


def draft_coins_reused(patch: Patch) -> None:
    """Whatever a coin decides, it is the draft's."""
    original = noise.Noise.coin
    patch.setattr(
        noise.Noise, "coin", lambda self, tag, start, step: original(self, "draft", start, 0)
    )


def coins_of_one_round(patch: Patch) -> None:
    """Every round spends the coins of the first: the second token repeats the first's luck."""
    original = noise.Noise.coin
    patch.setattr(
        noise.Noise, "coin", lambda self, tag, start, step: original(self, "bonus", 0, 0)
        if tag in ("bonus", "residual") else original(self, tag, start, step),
    )  # fmt: skip


# ---- verification


def residual_from_the_target(patch: Patch) -> None:
    patch.setattr(verify, "residual", lambda target, *_: target / target.sum())


def residual_on_the_path_only(patch: Patch) -> None:
    """Only the entry of the drafted token is corrected."""

    def broken(draft_ids: Any, draft_probs: Any, target_probs: Any) -> Any:
        laws = [
            DraftLaw(np.array([i], dtype=np.int64), np.array([law[i]])) if i is not None else law
            for i, law in zip(draft_ids, draft_probs, strict=True)
        ]
        plan = verify.rejection(draft_ids, draft_probs, target_probs)
        wrong = verify.rejection(draft_ids, laws, target_probs)
        return replace(plan, laws=wrong.laws)

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


def no_proposal_drawn_from_the_target(patch: Patch) -> None:
    def broken(draft_ids: Any, draft_probs: Any, target_probs: Any) -> Any:
        plan = verify.rejection(draft_ids, draft_probs, target_probs)

        def law(kept: int) -> Any:
            silent = kept < len(draft_ids) and draft_ids[kept] is None
            return target_probs[kept] if silent else plan.laws[kept]

        return replace(plan, laws=verify.Laws(len(draft_ids) + 1, law))

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


def bonus_from_the_draft(patch: Patch) -> None:
    def broken(draft_ids: Any, draft_probs: Any, target_probs: Any) -> Any:
        plan = verify.rejection(draft_ids, draft_probs, target_probs)

        def law(kept: int) -> Any:
            if 0 < kept == len(draft_ids):
                return dense(draft_probs[-1], len(target_probs[0]))
            return plan.laws[kept]

        return replace(plan, laws=verify.Laws(len(draft_ids) + 1, law))

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


def ratio_inverted(patch: Patch) -> None:
    def broken(draft_ids: Any, draft_probs: Any, target_probs: Any) -> Any:
        plan = verify.rejection(draft_ids, draft_probs, target_probs)
        accept = [
            0 if i is None else min(1.0, law[i] / max(1e-9, target_probs[n][i]))
            for n, (i, law) in enumerate(zip(draft_ids, draft_probs, strict=True))
        ]
        return replace(plan, accept=accept)

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


def target_masked_to_the_draft(patch: Patch) -> None:
    """The target may only say what the draft could propose."""

    def broken(draft_ids: Any, draft_probs: Any, target_probs: Any) -> Any:
        def law(row: int) -> Any:
            if not draft_probs or row >= len(draft_probs):
                return target_probs[row]
            masked = target_probs[row] * (dense(draft_probs[row], len(target_probs[row])) > 0)
            return masked / masked.sum() if masked.sum() else target_probs[row]

        return verify.rejection(draft_ids, draft_probs, verify.Laws(len(draft_ids) + 1, law))

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


def unlikely_drafts_dropped(patch: Patch) -> None:
    """A drawn token is thrown away because it looks unlikely, and the target draws afresh."""

    def broken(draft_ids: Any, draft_probs: Any, target_probs: Any) -> Any:
        plan = verify.rejection(draft_ids, draft_probs, target_probs)
        for n, i in enumerate(draft_ids):
            if i is not None and draft_probs[n][i] < 0.3:
                accept = [*plan.accept[:n], *([0] * (len(draft_ids) - n))]

                def law(kept: int, n: int = n) -> Any:
                    return target_probs[kept] if kept == n else plan.laws[kept]

                return replace(plan, accept=accept, laws=verify.Laws(len(draft_ids) + 1, law))
        return plan

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


def block_stops_early(patch: Patch) -> None:
    """Block verification with the stopping rule of rejection."""

    def broken(*arguments: Any) -> Any:
        return replace(verify.block(*arguments), longest=False)

    patch.setitem(decode.VERIFICATIONS, "block", broken)


def second_acceptance_free(patch: Patch) -> None:
    """Only the first drafted token is looked at."""

    def broken(*arguments: Any) -> Any:
        plan = verify.rejection(*arguments)
        after = [1 if chance else 0 for chance in plan.accept[1:]]
        return replace(plan, accept=[*plan.accept[:1], *after])

    patch.setitem(decode.VERIFICATIONS, "rejection", broken)


# ---- match and its noise


def draft_taken_at_its_word(patch: Patch) -> None:
    def broken(draft_ids: Any, draw: Any) -> list[int]:
        emitted: list[int] = []
        for row, proposed in enumerate([*draft_ids, None]):
            own = draw(row)
            emitted.append(own if proposed is None or row % 2 else proposed)
            if emitted[-1] != proposed:
                break
        return emitted

    patch.setattr(decode, "match", broken)


def rows_under_the_committed_prefix(patch: Patch) -> None:
    """Penalties do not see earlier tokens of the same draft."""

    def draw(self: Any, logits: Any, prefix: Any, position: int) -> int:
        law = self.sampler.law(logits, self.tokens)
        return decode.draw(law, self.noise, position, self.keys)

    patch.setattr(decode.DecodeSequence, "draw", draw)


def noise_without_position(patch: Patch) -> None:
    """Every token has the same luck wherever it stands. Drafted and plain still agree."""
    original = noise.Noise.uniform
    patch.setattr(noise.Noise, "uniform", lambda self, position, keys: original(self, 0, keys))


def law_too_flat(patch: Patch) -> None:
    """Plain decoding itself draws from a law that is too flat."""
    original = sampling.Sampler.law

    def law(self: Any, logits: Any, tokens: Any) -> Any:
        found = original(self, logits, tokens)
        return sampling.Law(found.token_ids, found.scores * np.float32(0.5))

    patch.setattr(sampling.Sampler, "law", law)


# ---- states


def rollback_does_nothing(patch: Patch) -> None:
    patch.setattr(ToyState, "rollback", lambda self, length: None)


def rollback_keeps_the_rejected_token(patch: Patch) -> None:
    original = ToyState.rollback

    def rollback(self: Any, length: int) -> None:
        following = self.tokens[length] if length < len(self.tokens) else None
        original(self, length)
        if following is not None and self.tokens:
            self.tokens[-1] = following

    patch.setattr(ToyState, "rollback", rollback)


class _OneTooMany:
    def __init__(self, state: Any) -> None:
        self._state = state

    def rollback(self, length: int) -> None:
        self._state.rollback(min(length + 1, self._state.length))


def kv_one_too_long(patch: Patch) -> None:
    """After a round the loop leaves one token too many in the target's state."""
    original = decode._settle

    def settle(sequence: Any, *rest: Any) -> None:
        state = sequence.state
        sequence.state = _OneTooMany(state)
        try:
            original(sequence, *rest)
        finally:
            sequence.state = state

    patch.setattr(decode, "_settle", settle)


UNION, TTP = ("union+rejection",), ("ttp+rejection",)
BROKEN = [
    Broken("draft law off", draft_law_off, FIRST, ("ttp+block",), "ttp+block"),
    Broken("draft coins reused", draft_coins_reused, FIRST, TTP, "ttp+rejection"),
    Broken("coins of one round", coins_of_one_round, PAIR, ("same+rejection",), effort=6),
    Broken("residual from the target", residual_from_the_target, FIRST, ("tli+block",)),
    Broken("residual on the path only", residual_on_the_path_only, FIRST, TTP),
    Broken("no proposal drawn from the target", no_proposal_drawn_from_the_target, FIRST, UNION),
    Broken("bonus from the draft", bonus_from_the_draft, PAIR, TTP, "after an accepted token"),
    Broken("ratio inverted", ratio_inverted, FIRST, ("tli+rejection",), "tli+rejection"),
    Broken("target masked to the draft", target_masked_to_the_draft, FIRST, TTP),
    Broken("unlikely drafts dropped", unlikely_drafts_dropped, FIRST, TTP),
    Broken("block stops early", block_stops_early, FIRST, ("same+block",), "same+block"),
    Broken("second acceptance free", second_acceptance_free, PAIR, ("same+rejection",), effort=5),
    Broken("draft taken at its word", draft_taken_at_its_word, IDENTITY, says="match"),
    Broken("rows under the committed prefix", rows_under_the_committed_prefix, IDENTITY),
    Broken("noise without position", noise_without_position, PAIR, says="plain"),
    Broken("law too flat", law_too_flat, FIRST, says="plain"),
    Broken("rollback does nothing", rollback_does_nothing, ROLLBACK),
    Broken("rollback keeps the rejected token", rollback_keeps_the_rejected_token, ROLLBACK),
    Broken("KV one too long", kv_one_too_long, ROLLBACK),
]


# ---- the toys

_LIKED = dict(zip(WORDS, [1.2, 0.6, 1.0, 0.7, 0.4, -0.5, -3.0, -3.0, 0.0, 0.0], strict=True))
_PIECES = {
    b" steam": 0.2, b" engine": 1.2, b" runs": 1.0, b" on": 0.0, b"\n": 0.2, b" runs on": 0.8,
    b" st": 0.3, b" wat": 0.3, b"eam": -4.0, b"er": -4.0,
}  # fmt: skip


def speaker(seed: int, *, shift: float = 0.0) -> ToyModel:
    """Says words: some more often than others, and what it says depends on the last ones."""
    model = toy(seed)
    scores = random_logits(len(WORDS), seed, scale=0.8, context=2)
    liked = np.array([*_LIKED.values()]) + shift * np.cos(np.arange(len(WORDS)))

    def logits(tokens: tuple[int, ...]) -> list[float]:
        end = 1.0 if tokens[-1] == WORDS.index(b".") else -9.0
        words = (np.array(scores(tokens)) + liked).tolist()
        return [*words, *[-9.0] * len(LETTERS), end, -99.0, -99.0]

    return ToyModel(model.vocabulary, logits, 400, name=f"speaker {seed}")


def stranger(seed: int = 5, fillers: int = 450) -> ToyModel:
    """Speaks much as the target does, in other pieces; with fillers too large for `slrs`."""
    more = [b"filler %d" % number for number in range(fillers)]
    tokens: list[bytes | None] = [*_PIECES, *LETTERS, *more, None]
    end = len(tokens) - 1
    vocabulary = Vocabulary.from_tokens(
        tokens, name="stranger", eos_ids=[end], controls={end: "<end>"}
    )
    scores = random_logits(len(_PIECES), seed, scale=0.8, context=2)
    letters = [0.0 if code in b".a" else -9.0 for code in range(32, 127)]

    def logits(prefix: tuple[int, ...]) -> list[float]:
        words = (np.array(scores(prefix)) + np.array([*_PIECES.values()])).tolist()
        return [*words, *letters, *[-20.0] * fillers, -3.0]

    return ToyModel(vocabulary, logits, 400, name="stranger")


MODELS: dict[str, Callable[[], ToyModel]] = {
    "toy": lambda: speaker(1),
    "cousin": lambda: speaker(2, shift=1.2),
    "stranger": stranger,
    "tiny stranger": lambda: stranger(fillers=0),
}


@contextmanager
def planted(name: str) -> Iterator[Broken]:
    """The running package with one fault in it."""
    broken = next(b for b in BROKEN if b.name == name)
    with pytest.MonkeyPatch.context() as patch:
        broken.plant(patch)
        yield broken


def main() -> None:
    from anydraft import backends
    from anydraft.cli.main import main as command_line

    backends.load_model = lambda spec, **options: MODELS[spec]()  # type: ignore[assignment]
    name = os.environ.get(VARIABLE, "")
    if not name:
        command_line()
        return
    with planted(name):
        command_line()


if __name__ == "__main__":
    sys.exit(main())
