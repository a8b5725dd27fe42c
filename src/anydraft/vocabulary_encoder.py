"""Bytes to ids through a Hugging Face tokenizer, which takes only text and knows special tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_REPLACEMENT = "\ufffd".encode()
_BYTE_SPELLING = "<0x[0-9A-Fa-f]{2}>"


class HfEncoder:
    """Encodes any bytes; control tokens typed as text stay text.

    Args:
        at_start: tokenizer for the start of a text; special tokens are not matched in it.
        going_on: the same without a dummy prefix.
        spoken: bytes of each id, b"" for control and padding ids.
        controls: spelling of the ids that text must never become.
        byte_ids: byte value -> the id that spells just this byte.
        marker: the character that stands for a space inside the tokenizer ("▁"), if any. Typed by a
            user it is spelled in bytes, because the tokenizer would take it for a space.
        byte_spellings: whether the tokenizer would take typed "<0x41>" for a byte token.
        keep: control ids that may stay (the unknown token where the tokenizer has no bytes).
    """

    def __init__(
        self,
        at_start: Tokenizer,
        going_on: Tokenizer,
        *,
        spoken: Sequence[bytes],
        controls: Mapping[int, str],
        byte_ids: Mapping[int, int],
        marker: str | None = None,
        byte_spellings: bool = False,
        keep: Collection[int] = (),
    ) -> None:
        self._at_start = at_start
        self._going_on = going_on
        self._spoken = spoken
        self._never = frozenset(controls) - frozenset(keep)
        self._byte_ids = dict(byte_ids)
        self._marker = marker
        self._control_texts = sorted(filter(None, controls.values()), key=len, reverse=True)
        self._byte_spellings = byte_spellings
        self._missing = frozenset(range(256)) - self._byte_ids.keys() if byte_ids else frozenset()
        self._replacement = self._replace()
        awkward = [marker.encode()] if marker and self._byte_ids else []
        patterns = [re.escape(text) for text in awkward]
        if self._missing:
            patterns.append(b"[" + b"".join(re.escape(bytes([b])) for b in self._missing) + b"]")
        if byte_spellings:
            patterns.append(_BYTE_SPELLING.encode())
        self._awkward = re.compile(b"|".join(patterns)) if patterns else None

    def _replace(self) -> list[int]:
        """Ids of U+FFFD, which stands for what cannot be spelled; empty where it cannot either."""
        ids = self._going_on.encode("\ufffd", add_special_tokens=False).ids
        spelled = b"".join(self._spoken[i] for i in ids) == _REPLACEMENT
        return ids if spelled and self._never.isdisjoint(ids) else []

    def encode(self, data: bytes, continuation: bool) -> list[int]:
        """Ids of `data`."""
        text = self._plain(data)
        if text is not None:
            tokenizer = self._going_on if continuation else self._at_start
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            if self._never.isdisjoint(ids):
                return ids
        return self._encode_pieces(data, continuation)[0]

    def encode_with_ends(self, data: bytes, continuation: bool) -> tuple[list[int], list[int]]:
        """Ids of `data` and their ends in it."""
        text = self._plain(data)
        if text is not None:
            tokenizer = self._going_on if continuation else self._at_start
            encoding = tokenizer.encode(text, add_special_tokens=False)
            if self._never.isdisjoint(encoding.ids):
                return encoding.ids, self._ends(encoding, text, data)
        return self._encode_pieces(data, continuation)

    def _plain(self, data: bytes) -> str | None:
        """The text, if the tokenizer can take it as it is."""
        if self._awkward is not None and self._awkward.search(data):
            return None
        try:
            return data.decode()
        except UnicodeDecodeError:
            return None

    def _ends(self, encoding: Encoding, text: str, data: bytes) -> list[int]:
        pieces = [self._spoken[i] for i in encoding.ids]
        joined = b"".join(pieces)
        if joined == data:
            return list(accumulate(map(len, pieces)))
        if len(joined) == len(data) + 1 and joined.endswith(data):  # a dummy prefix
            return [end - 1 for end in accumulate(map(len, pieces))]
        return _ends_by_offsets(encoding.offsets, text)

    def _encode_pieces(self, data: bytes, continuation: bool) -> tuple[list[int], list[int]]:
        """The careful way: byte by byte where the tokenizer cannot be trusted with the text."""
        ids: list[int] = []
        ends: list[int] = []
        at = 0
        for piece, is_text in self._pieces(data):
            if is_text:
                tokenizer = self._going_on if continuation or at else self._at_start
                text = piece.decode()
                encoding = tokenizer.encode(text, add_special_tokens=False)
                for token_id, end in zip(
                    encoding.ids, self._ends(encoding, text, piece), strict=True
                ):
                    if token_id not in self._never:
                        ids.append(token_id)
                        ends.append(at + end)
            elif self._missing.isdisjoint(piece) and self._byte_ids:
                ids += [self._byte_ids[b] for b in piece]
                ends += range(at + 1, at + len(piece) + 1)
            else:
                ids += self._replacement
                ends += [at] * (len(self._replacement) - 1) + [at + len(piece)] * bool(
                    self._replacement
                )
            at += len(piece)
        return ids, ends

    def _pieces(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Cut `data` into (piece, whether the tokenizer takes it); others are spelled in bytes."""
        for run, valid in _utf8_runs(data):
            if not valid:
                yield from ((bytes([b]), False) for b in run)
                continue
            held = 0
            text = run.decode()
            cuts = self._cuts(text)
            for at, char in enumerate(text):
                if self._spelled_in_bytes(char):
                    if held < at:
                        yield text[held:at].encode(), True
                    yield char.encode(), False
                    held = at + 1
                elif at in cuts and held < at:
                    yield text[held:at].encode(), True
                    held = at
            if held < len(text):
                yield text[held:].encode(), True

    def _spelled_in_bytes(self, char: str) -> bool:
        if char == self._marker and self._byte_ids:
            return True
        return not self._missing.isdisjoint(char.encode())

    def _cuts(self, text: str) -> set[int]:
        """Offsets inside typed control spellings, where cutting keeps them text."""
        if not self._byte_spellings:
            ids = self._going_on.encode(text, add_special_tokens=False).ids
            if self._never.isdisjoint(ids):
                return set()
        return {match.start() + 1 for match in self._spellings.finditer(text)}

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        """Compiled when first needed: for Gemma's 6,249 control tokens it takes 0.2 s."""
        spelled = [re.escape(text) for text in self._control_texts]
        if self._byte_spellings:
            spelled.append(_BYTE_SPELLING)
        return re.compile("|".join(spelled) or "(?!)")


def _utf8_runs(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Maximal valid UTF-8 runs, and the bytes between them."""
    at = 0
    while at < len(data):
        try:
            data[at:].decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield data[at : at + error.start], True
            yield data[at + error.start : at + error.end], False
            at += error.end
        else:
            yield data[at:], True
            return


def _ends_by_offsets(offsets: Sequence[tuple[int, int]], text: str) -> list[int]:
    """Byte ends from the tokenizer's character offsets; see Vocabulary.encode_with_ends."""
    at_byte = [0, *accumulate(len(char.encode()) for char in text)]
    ends = []
    last = 0
    for index, (_, end) in enumerate(offsets):
        if index + 1 < len(offsets):  # the next id is another part of the same character
            end = min(end, max(offsets[index + 1][0], 0))
        last = max(last, at_byte[end])
        ends.append(last)
    return ends
