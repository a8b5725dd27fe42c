"""Proposal laws: what a draft's own law becomes over the target's ids.

A draft token is written as target ids by a table that is made once per pair of vocabularies. The
first of them is drawn from the push-forward of the draft's law: each target id gets the
probabilities of all draft tokens that begin with it. Further pieces of the same draft token are
drawn, given the ones before them and that more follow, from the draft tokens that go on alike.
Both are exactly what was drawn from, which is all that `rejection` and `block` ask for.

The laws differ in the table and in what the draft may not draw:

- `same`: one vocabulary; ids that differ are never drawn.
- `union`: a token that both vocabularies have proposes itself, every other one proposes nothing
  (Timor et al. 2025, arXiv 2502.05202, algorithm 1).
- `tli`: the same, but only shared tokens are drawn at all (their algorithm 4).
- `ttp`: every token is drawn and proposes the ids that the target's tokenizer makes of its bytes.
- `slrs`: as `ttp` for all sequences of LOOKAHEAD draft tokens at once, so that pieces may merge
  across them (their algorithm 3); one pass of the draft for every beginning of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anydraft.drafter import DraftLaw

if TYPE_CHECKING:
    from anydraft.drafters.cross_vocabulary import Bridge
    from anydraft.vocabulary import Comparison, Vocabulary

Ids = npt.NDArray[np.int64]
Pieces = tuple[int, ...]

LOOKAHEAD = 2  # draft tokens that slrs looks at together
MAX_OUTCOMES = 300_000  # sequences of draft tokens that slrs may enumerate


def law_reasons(target: Vocabulary, draft: Vocabulary, comparison: Comparison) -> dict[str, str]:
    """Law -> "" if it applies to the pair, else why not."""
    if comparison.same:
        alike = "the draft has the target's vocabulary: use the law 'same'"
        return {"same": "", **dict.fromkeys(("union", "tli", "ttp", "slrs"), alike)}
    across = comparison.methods["cross_vocabulary"]
    shared = across or ("" if (comparison.draft_to_target >= 0).any() else "no token is shared")
    count = draft.size**LOOKAHEAD
    many = (
        f"slrs enumerates all {count:,} sequences of {LOOKAHEAD} draft tokens, a pass of the draft "
        f"for each beginning, and stops at {MAX_OUTCOMES:,}: it is for byte-level drafts; use "
        "'ttp', which is slrs with one token at a time"
    )
    return {
        "same": comparison.methods["draft_model"],
        "union": shared,
        "tli": shared,
        "ttp": across,
        "slrs": across or (many if count > MAX_OUTCOMES else ""),
    }


class PieceTable:
    """What each outcome of a draft step proposes.

    Args:
        pieces: per outcome (a draft id, or a sequence of them) its target ids; () is none.
    """

    def __init__(self, pieces: Sequence[Pieces]) -> None:
        self.pieces = list(pieces)
        first = np.fromiter((p[0] if p else -1 for p in self.pieces), np.int64, len(self.pieces))
        self.silent: Ids = np.flatnonzero(first < 0)
        """Outcomes that propose nothing."""
        self._first = _Scatter(first)
        self._groups: dict[Pieces, list[int]] = {}
        for outcome, ids in enumerate(self.pieces):
            for length in range(1, len(ids)):
                self._groups.setdefault(ids[:length], []).append(outcome)
        self._inner: dict[Pieces, tuple[Ids, _Scatter]] = {}

    def proposals(self, probs: Any, outcome: int) -> tuple[Pieces, list[DraftLaw]]:
        """What an outcome drawn from `probs` proposes.

        Returns:
            Its target ids, and the law of each given the ones before it; one law and no id where
            it proposes nothing.
        """
        ids = self.pieces[outcome]
        laws = [self._first.law(probs)]
        for length in range(1, len(ids)):
            members, scatter = self._going_on(ids[:length])
            going_on = probs[members]
            laws.append(scatter.law(going_on / going_on.sum()))
        return ids, laws

    def _going_on(self, prefix: Pieces) -> tuple[Ids, _Scatter]:
        """The outcomes that have more after `prefix`, and what comes next in each."""
        if prefix not in self._inner:
            members = np.array(self._groups[prefix], dtype=np.int64)
            following = np.array([self.pieces[m][len(prefix)] for m in members], dtype=np.int64)
            self._inner[prefix] = members, _Scatter(following)
        return self._inner[prefix]


class _Scatter:
    """Adds up the probabilities of outcomes by their target id; -1 is left out."""

    def __init__(self, target_ids: Ids) -> None:
        self.token_ids: Ids = np.unique(target_ids[target_ids >= 0])
        self._slots = np.searchsorted(self.token_ids, target_ids)
        self._slots[target_ids < 0] = len(self.token_ids)

    def law(self, probs: Any) -> DraftLaw:
        size = len(self.token_ids) + 1
        if probs.dtype == object:  # proofs
            sums = np.zeros(size, dtype=object)
            np.add.at(sums, self._slots, probs)
        else:
            sums = np.bincount(self._slots, weights=probs, minlength=size)
        return DraftLaw(self.token_ids, sums[:-1])


def shared_table(draft_to_target: Sequence[int]) -> PieceTable:
    """Draft ids that are target ids propose themselves."""
    return PieceTable([(i,) if i >= 0 else () for i in draft_to_target])


def bridge_table(bridge: Bridge, law: str, *, chat: bool) -> PieceTable:
    """The table of a pair of vocabularies for "union", "tli", "ttp" or "slrs"."""
    whole = law in ("ttp", "slrs")
    pieces = [_pieces(bridge, i, whole=whole, chat=chat) for i in range(bridge.draft.size)]
    if law != "slrs":
        return PieceTable(pieces)
    sequences: list[Pieces] = []
    for index in range(bridge.draft.size**LOOKAHEAD):
        path = list(np.unravel_index(index, (bridge.draft.size,) * LOOKAHEAD))
        sequences.append(_sequence_pieces(bridge, [int(i) for i in path], pieces))
    return PieceTable(sequences)


def ends_draft(bridge: Bridge, draft_id: int) -> bool:
    """Whether nothing is drafted after this id: it ends a text, or has no bytes."""
    return draft_id in bridge.draft_ends or bridge.draft.token_bytes[draft_id] is None


def _pieces(bridge: Bridge, draft_id: int, *, whole: bool, chat: bool) -> Pieces:
    """Target ids that one draft id proposes."""
    if ends_draft(bridge, draft_id):
        ends = draft_id in bridge.draft_ends
        control = bridge.target_end(chat=chat) if ends else bridge.target_controls.get(draft_id)
        return () if control is None else (control,)
    data = bridge.draft.token_bytes[draft_id] or b""
    if bridge.to_target[draft_id] >= 0:
        return (bridge.to_target[draft_id],)
    return tuple(bridge.retokeniser.candidates((), data)) if whole and data else ()


def _sequence_pieces(bridge: Bridge, path: Sequence[int], pieces: Sequence[Pieces]) -> Pieces:
    """Target ids of a sequence of draft ids; nothing is read after one that ends the draft."""
    data = b""
    last: Pieces = ()
    for draft_id in path:
        if ends_draft(bridge, draft_id):
            last = pieces[draft_id]
            break
        data += bridge.draft.token_bytes[draft_id] or b""
    return (*(bridge.retokeniser.candidates((), data) if data else ()), *last)
