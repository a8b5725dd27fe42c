"""Drafted bytes become target ids: by the target's own tokenizer, after its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anydraft.drafters.bridge import (
    MAX_CUT_BYTES,
    MAX_CUT_TOKENS,
    starts_word,
    unfinished_character,
)

if TYPE_CHECKING:
    from anydraft.vocabulary import Vocabulary

_SPACE = b" \n\t\r"


class Retokeniser:
    """Writes drafted bytes in target ids.

    Args:
        vocabulary: the target's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._literals = {text.encode(): i for i, text in vocabulary.control_text.items() if text}
        self._literal_lengths = sorted({len(text) for text in self._literals}, reverse=True)
        self._literal_starts = sorted({text[:1] for text in self._literals})

    def candidates(self, tokens: Sequence[int], drafted: bytes) -> list[int]:
        """Target ids of `drafted` after `tokens`, which are never altered.

        What spells a control id of the target becomes that id. Bytes that cannot follow (they do
        not complete the character that `tokens` left unfinished) give no ids.
        """
        parts = self._split_at_controls(drafted)
        first = parts[0]
        ids: list[int] = []
        if isinstance(first, bytes):
            ids = self._in_context(tokens, first)
            if not ids:
                return []
            parts = parts[1:]
        for part in parts:
            ids += [part] if isinstance(part, int) else self._vocabulary.encode(part)
        return ids

    def _split_at_controls(self, data: bytes) -> list[bytes | int]:
        """Text and control ids in turn."""
        if not any(start in data for start in self._literal_starts):
            return [data]
        parts: list[bytes | int] = []
        begin = at = 0
        while at < len(data):
            if data[at : at + 1] in self._literal_starts:
                for length in self._literal_lengths:
                    control = self._literals.get(data[at : at + length])
                    if control is not None:
                        parts += [data[begin:at], control] if at > begin else [control]
                        begin = at + length
                        at = begin - 1
                        break
            at += 1
        return [*parts, data[begin:]] if begin < len(data) else parts

    def _in_context(self, tokens: Sequence[int], data: bytes) -> list[int]:
        context, before = self._context(tokens, data)
        if unfinished_character(before) and data[0] & 0xC0 != 0x80:
            return []
        if context:
            ids = self._vocabulary.encode(before + data)
            if ids[: len(context)] == context:
                return ids[len(context) :]
        return self._vocabulary.encode(data)

    def _context(self, tokens: Sequence[int], data: bytes) -> tuple[list[int], bytes]:
        """The tokens from the last safe cut on, with their bytes; none if `data` starts a word."""
        token_bytes = self._vocabulary.token_bytes
        last = token_bytes[tokens[-1]] if len(tokens) else None
        if not last:
            return [], b""
        if data[0] in _SPACE and last[-1] not in _SPACE and last[-1] < 0x80:
            return [], b""
        index = self._safe_cut(tokens)
        context = list(tokens[index:])
        return context, b"".join([token_bytes[i] or b"" for i in context])

    def _safe_cut(self, tokens: Sequence[int]) -> int:
        """Index of the token that starts the last word, at most 16 tokens or 64 bytes back.

        Without one it is the token in which an unfinished last character starts.
        """
        token_bytes = self._vocabulary.token_bytes
        size, index = 0, len(tokens)
        while index > max(0, len(tokens) - MAX_CUT_TOKENS):
            piece = token_bytes[tokens[index - 1]]
            if piece is None:
                return index  # a control id ends whatever was before it
            size += len(piece)
            if size > MAX_CUT_BYTES:
                break
            index -= 1
            earlier = token_bytes[tokens[index - 1]] if index else None
            if not earlier or starts_word(earlier[-1:] + piece, 1):
                return index
        return self._last_character(tokens)

    def _last_character(self, tokens: Sequence[int]) -> int:
        """Index of the token in which an unfinished last character starts, or len(tokens)."""
        token_bytes = self._vocabulary.token_bytes
        tail = b""
        for index in range(len(tokens) - 1, max(0, len(tokens) - 4) - 1, -1):
            tail = (token_bytes[tokens[index]] or b"") + tail
            if len(tail) >= 4 or tail[0] & 0xC0 != 0x80:
                return index if unfinished_character(tail) else len(tokens)
        return len(tokens)
