"""Two vocabularies side by side: which ids mean the same, and which drafters that allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from anydraft.vocabulary import Vocabulary

Ids = npt.NDArray[np.int64]

_CONTROL, _ADDED = 2, 1  # TokenKind values; the enum's module imports this one

# Two vocabularies that split this text alike have the same merges for all practical purposes.
_PROBE = (
    "The quick brown fox jumps over 12345 lazy dogs; isn't it?\n\n"
    "def f(x):\n\treturn {'a': [x != 0, None]}  # café, naïve, Straße\n"
    "Привет, мир! 你好，世界。 こんにちは 안녕하세요 مرحبا สวัสดี 😀👍🏽 \u0000\u00a0"
).encode()


@dataclass(frozen=True)
class Comparison:
    """What two vocabularies share."""

    same: bool
    """One vocabulary for all practical purposes: ids can be shared, but those that map to -1."""
    target_to_draft: Ids
    """Per target id the draft id with the same bytes, -1 where there is none. Control ids map only
    where `same` (pair them by `roles_matched` otherwise); padding never maps."""
    draft_to_target: Ids
    target_overlap: float
    """Share of the target's ordinary and added ids whose bytes are one id of the draft."""
    draft_overlap: float
    methods: dict[str, str]
    """"draft_model", "cross_vocabulary", "lookup" -> "" if it applies, else why not."""
    roles_matched: dict[str, tuple[int, int]]
    """Role -> (target id, draft id)."""
    notes: list[str] = field(default_factory=list)


def compare(target: Vocabulary, draft: Vocabulary) -> Comparison:
    """Compare by bytes, never by spelling or by size."""
    forward, backward = _map_by_bytes(target, draft), _map_by_bytes(draft, target)
    target_overlap, draft_overlap = _share(target, forward), _share(draft, backward)
    same, why_not, notes = _sameness(target, draft)
    if same:
        forward, backward = _identity(target, draft), _identity(draft, target)
    inexact = [
        f"the bytes of {side} tokens are not certain: {vocabulary.inexact_reason}"
        for side, vocabulary in (("the target's", target), ("the draft's", draft))
        if not vocabulary.exact
    ]
    roles = {
        role: (token_id, draft.roles[role])
        for role, token_id in target.roles.items()
        if role in draft.roles
    }
    return Comparison(
        same=same,
        target_to_draft=forward,
        draft_to_target=backward,
        target_overlap=target_overlap,
        draft_overlap=draft_overlap,
        methods={
            "draft_model": "" if same else why_not,
            "cross_vocabulary": "; ".join(inexact),
            "lookup": "",
        },
        roles_matched=roles,
        notes=notes,
    )


def _map_by_bytes(source: Vocabulary, other: Vocabulary) -> Ids:
    get = other.ids_by_bytes.get
    return np.fromiter(
        (-1 if data is None else get(data, -1) for data in source.token_bytes),
        np.int64,
        count=source.size,
    )


def _share(vocabulary: Vocabulary, mapping: Ids) -> float:
    speaking = vocabulary.kinds <= _ADDED
    return float((mapping[speaking] >= 0).mean()) if speaking.any() else 0.0


def _equal_ids(one: Vocabulary, other: Vocabulary) -> npt.NDArray[np.bool_]:
    """Per id up to the smaller size: same kind of thing, same bytes or the same spelling."""
    width = min(one.size, other.size)
    equal = np.fromiter(
        (
            a == b and a is not None
            for a, b in zip(one.token_bytes[:width], other.token_bytes[:width], strict=True)
        ),
        np.bool_,
        count=width,
    )
    for token_id, text in one.control_text.items():
        if token_id < width:
            equal[token_id] = other.control_text.get(token_id) == text
    return equal


def _identity(source: Vocabulary, other: Vocabulary) -> Ids:
    mapping = np.full(source.size, -1, np.int64)
    equal = np.flatnonzero(_equal_ids(source, other))
    mapping[equal] = equal
    return mapping


def _sameness(one: Vocabulary, other: Vocabulary) -> tuple[bool, str, list[str]]:
    """(same, why not, notes)."""
    equal = _equal_ids(one, other)
    used = np.zeros(max(one.size, other.size), np.bool_)
    for vocabulary in (one, other):
        used[: vocabulary.size] |= np.asarray(vocabulary.kinds) <= _CONTROL
    union = np.flatnonzero(used)
    agreeing = int(equal.sum())
    used[: len(equal)] &= ~equal
    differing = np.flatnonzero(used).tolist()
    width = len(equal)
    both = used[:width] & (np.asarray(one.kinds)[:width] == 0)
    ordinary = np.flatnonzero(both & (np.asarray(other.kinds)[:width] == 0))
    if len(differing) > max(2, 0.01 * len(union)) or len(ordinary) > max(1, 0.001 * len(union)):
        return (
            False,
            (f"only {agreeing:,} of {len(union):,} ids mean the same in both vocabularies"),
            [],
        )
    if one.encode(_PROBE) != other.encode(_PROBE):
        return False, "the vocabularies list the same tokens but split text differently", []
    return True, "", [_describe(one, other, differing)] if differing else []


def _describe(one: Vocabulary, other: Vocabulary, differing: list[int]) -> str:
    def spelling(vocabulary: Vocabulary, token_id: int) -> str:
        if token_id >= vocabulary.size:
            return "nothing"
        if token_id in vocabulary.control_text:
            return vocabulary.control_text[token_id]
        data = vocabulary.token_bytes[token_id]
        return "nothing" if data is None else repr(data.decode("utf-8", "replace"))

    shown = ", ".join(f"{i} ({spelling(one, i)} / {spelling(other, i)})" for i in differing[:8])
    more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
    return f"{len(differing)} ids differ and are never shared: {shown}{more}"
