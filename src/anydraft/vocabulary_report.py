"""Two vocabularies compared, for people: what is missing on each side, and what to do."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anydraft.vocabulary import Comparison, TokenKind, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCRIPTS = {"CJK": "Han", "HANGUL": "Korean", "HIRAGANA": "Japanese", "KATAKANA": "Japanese"}
_NUM_SAMPLES = 4


@dataclass
class Missing:
    """Tokens of one kind that the other vocabulary has no id for."""

    kind: str
    """A script ("Latin", "Han"), or "digits", "white space", "symbols", "parts of a character"."""
    count: int = 0
    samples: list[str] = field(default_factory=list)


def missing(vocabulary: Vocabulary, mapping: npt.NDArray[np.int64]) -> list[Missing]:
    """What `mapping` (ids of `vocabulary` to another's) leaves out, most frequent kind first."""
    groups: dict[str, Missing] = {}
    speaking = vocabulary.kinds <= TokenKind.ADDED
    for token_id in np.flatnonzero(speaking & (mapping < 0)).tolist():
        data = vocabulary.token_bytes[token_id] or b""
        kind = kind_of(data)
        group = groups.setdefault(kind, Missing(kind))
        group.count += 1
        # Low ids are frequent tokens; single characters say little.
        if len(group.samples) < _NUM_SAMPLES and (len(data) > 2 or kind != "Latin"):
            group.samples.append(_readable(data))
    return sorted(groups.values(), key=lambda group: -group.count)


def kind_of(data: bytes) -> str:
    """The script of a token's first letter, or what else it is made of."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "parts of a character"
    kinds = [_kind_of_character(char) for char in text]
    scripts = [kind for kind in kinds if kind[0].isupper()]
    if scripts:
        return scripts[0]
    for kind in ("digits", "symbols"):
        if kind in kinds:
            return kind
    return "white space"


@lru_cache(maxsize=20_000)
def _kind_of_character(char: str) -> str:
    category = unicodedata.category(char)
    if char.isspace():
        return "white space"
    if category == "Nd":
        return "digits"
    if category[0] in "LM":
        word = unicodedata.name(char, "OTHER").split()[0].split("-")[0]
        return _SCRIPTS.get(word, word.capitalize()) if category[0] == "L" else "symbols"
    return "symbols"


def _readable(data: bytes) -> str:
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return " ".join(f"{b:02x}" for b in data)


def report(target: Vocabulary, draft: Vocabulary, comparison: Comparison) -> dict[str, Any]:
    """All that `anydraft check` says, ready for JSON."""
    return {
        "target": _side(target, comparison.target_to_draft, comparison.target_overlap),
        "draft": _side(draft, comparison.draft_to_target, comparison.draft_overlap),
        "same": comparison.same,
        "methods": {
            name: {"applies": not reason, "reason": reason or None}
            for name, reason in comparison.methods.items()
        },
        "roles_matched": {
            role: {"target": _named(target, ids[0]), "draft": _named(draft, ids[1])}
            for role, ids in comparison.roles_matched.items()
        },
        "notes": [*comparison.notes, *_notes(target, draft)],
        "advice": advice(target, draft, comparison),
    }


def _side(vocabulary: Vocabulary, mapping: npt.NDArray[np.int64], overlap: float) -> dict[str, Any]:
    counts = np.bincount(vocabulary.kinds, minlength=len(TokenKind)).tolist()
    return {
        "name": vocabulary.name,
        "size": vocabulary.size,
        **{kind.name.lower(): counts[kind] for kind in TokenKind},
        "overlap": round(overlap, 4),
        "not_in_the_other": [
            {"kind": group.kind, "count": group.count, "samples": group.samples}
            for group in missing(vocabulary, mapping)
        ],
        "missing_bytes": sorted(vocabulary.missing_bytes),
        "rewrites_text": vocabulary.rewrites_text,
        "chat_template": vocabulary.chat_template is not None,
        "inexact_reason": vocabulary.inexact_reason,
    }


def _named(vocabulary: Vocabulary, token_id: int) -> str:
    return vocabulary.control_text.get(token_id) or _readable(
        vocabulary.token_bytes[token_id] or b""
    )


def _notes(target: Vocabulary, draft: Vocabulary) -> Iterable[str]:
    if target.chat_template is not None and draft.chat_template is None:
        yield "the draft has no chat template: it reads chats as a plain transcript"
    if target.chat_template is None and draft.chat_template is not None:
        yield "the target has no chat template: it takes plain prompts, not messages"
    if not target.eos_ids:
        yield "the target has no end token: answers end at max_tokens or a stop string"
    if draft.rewrites_text:
        yield f"the draft reads text rewritten by {draft.rewrites_text}: some acceptance is lost"


def advice(target: Vocabulary, draft: Vocabulary, comparison: Comparison) -> str:
    """One sentence: what to use."""
    if comparison.same:
        return "One vocabulary: the draft shares the target's ids, nothing is translated."
    if comparison.methods["cross_vocabulary"]:
        return "This draft cannot serve this target; --draft lookup can, it needs no draft model."
    share = f"{100 * comparison.draft_overlap:.0f} % of the draft's tokens are one of the target's"
    if comparison.draft_overlap < 0.4:
        return (
            f"Translated through bytes, but only {share}: expect few accepted tokens, "
            "and compare with --draft lookup."
        )
    return (
        f"Translated through bytes: {share}. Whether it is faster depends on both models' speed: "
        "`anydraft generate --verify-plain` shows the same tokens and both speeds."
    )
