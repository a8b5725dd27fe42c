"""The text between two vocabularies, as bytes: what the target said, and the draft's ids for it.

`SourceText` turns target ids into bytes. `DraftText` keeps draft ids for those bytes, each with its
end in them, and changes as few ids as it can when bytes are added: what the draft proposed and the
target confirmed stays as it is, and only a tail from a safe cut on is encoded. Nothing here costs
more than the last few tokens, however long the text is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydraft.vocabulary import Vocabulary

MAX_CUT_TOKENS = 16
MAX_CUT_BYTES = 64
MARK = 0xFF  # stands for a control id; no UTF-8 text holds this byte
_SPACE = frozenset(b" \n\t\r")


def starts_word(data: bytes | bytearray, index: int) -> bool:
    """Whether a pre-token starts at `index` in any tokenizer: white space after something else."""
    return index == 0 or (
        index < len(data) and data[index] in _SPACE and data[index - 1] not in _SPACE
    )


def unfinished_character(data: bytes | bytearray) -> int:
    """How many bytes at the end of `data` begin a UTF-8 character that is not complete; 0 to 3."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if byte < 0xF8 and back < needed else 0
        if byte < 0x80:
            return 0
    return 0


class SourceText:
    """Bytes of the target's tokens.

    A control id with a counterpart in the draft is one MARK byte, and `marks` says which draft id
    is meant; one without a counterpart is its literal spelling.

    Args:
        vocabulary: the target's.
        controls: target control id -> draft id.
        skip: leading tokens that are not part of this text (the draft has its own form of them).
    """

    def __init__(self, vocabulary: Vocabulary, controls: Mapping[int, int], skip: int) -> None:
        self.data = bytearray()
        self.marks: dict[int, int] = {}
        self._vocabulary = vocabulary
        self._controls = controls
        self._skip = skip
        self._ends: list[int] = []  # after each token

    def append(self, token_id: int) -> None:
        """Add one target token."""
        if len(self._ends) >= self._skip:
            piece = self._vocabulary.token_bytes[token_id]
            if piece is None:
                piece = self._control(token_id)
            self.data += piece
        self._ends.append(len(self.data))

    def _control(self, token_id: int) -> bytes:
        if token_id in self._controls:
            self.marks[len(self.data)] = self._controls[token_id]
            return bytes([MARK])
        return self._vocabulary.control_text.get(token_id, "").encode()

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens."""
        if count >= len(self._ends):
            return
        del self._ends[count:]
        del self.data[self._ends[-1] if self._ends else 0 :]
        self.marks = {at: mark for at, mark in self.marks.items() if at < len(self.data)}


class DraftText:
    """Draft ids for a source text, and drafted ids after them.

    Attributes:
        ids: draft ids. The first `num_confirmed` stand for the source up to `covered`, the others
            were drafted after that and are not contradicted by the source.
        num_confirmed, covered: see `ids`.

    Args:
        vocabulary: the draft's.
        prefix: ids that come before the text and stand for none of its bytes.
        continuation: whether the text goes on from the prefix (no dummy prefix is put before it).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        source: SourceText,
        prefix: Sequence[int],
        *,
        continuation: bool,
    ) -> None:
        self.ids = list(prefix)
        self.num_confirmed = len(self.ids)
        self.covered = 0
        self._vocabulary = vocabulary
        self._source = source
        self._ends = [0] * len(self.ids)
        self._num_fixed = len(self.ids)
        self._base = 0  # offset in the source where the first id after the fixed ones starts
        self._continuation = continuation

    @property
    def drafted(self) -> bytes:
        """Bytes of the drafted ids; the first `gap` of them are in the source already."""
        token_bytes = self._vocabulary.token_bytes
        return b"".join([token_bytes[i] or b"" for i in self.ids[self.num_confirmed :]])

    @property
    def gap(self) -> int:
        """Source bytes that no confirmed id stands for: drafts must begin with them."""
        return len(self._source.data) - self.covered

    def push(self, draft_id: int) -> None:
        """Add a drafted id."""
        self.ids.append(draft_id)

    def follow_source(self, *, keep_drafts: bool = True) -> int:
        """Bring the ids in line with the source after it has changed.

        Args:
            keep_drafts: whether drafted ids that the source does not contradict, but has not
                reached either, stay as drafts.

        Returns:
            How many leading ids are the same as before; a model state must forget the rest.
        """
        unchanged = self._confirm()
        if keep_drafts and unchanged == len(self.ids) and self.num_confirmed < len(self.ids):
            return unchanged  # drafts that go beyond the source, or end inside its last token
        unchanged = self.num_confirmed
        del self.ids[unchanged:]
        stop = self._expressible_end()
        if stop > self.covered:
            unchanged = self._encode_tail(stop)
        return unchanged

    def source_truncated(self) -> bool:
        """The source became shorter: drop the ids that end beyond it. False: start anew."""
        length = len(self._source.data)
        if length >= self.covered:
            return True
        if length < self._base:
            return False
        count = max(self._num_fixed, bisect_right(self._ends, length))
        del self.ids[count:]
        del self._ends[count:]
        self.num_confirmed = count
        self.covered = self._end_of(count)
        return True

    def _end_of(self, count: int) -> int:
        """Source offset where the first `count` ids end."""
        return self._ends[count - 1] if count > self._num_fixed else self._base

    def _confirm(self) -> int:
        """Confirm drafted ids that the source spells out.

        Returns:
            How many leading ids do not contradict the source.
        """
        data, marks = self._source.data, self._source.marks
        token_bytes = self._vocabulary.token_bytes
        while self.num_confirmed < len(self.ids):
            piece = token_bytes[self.ids[self.num_confirmed]] or b""
            end = self.covered + len(piece)
            there = data[self.covered : end]
            if MARK in there and any(at in marks for at in range(self.covered, end)):
                break
            if there != piece:
                # Not contradicted only if the source ends inside this piece.
                return len(self.ids) if piece.startswith(there) else self.num_confirmed
            self._ends.append(end)
            self.covered = end
            self.num_confirmed += 1
        return self.num_confirmed

    def _expressible_end(self) -> int:
        """Where the source can be encoded to: an unfinished character may have to wait."""
        data = self._source.data
        owed = unfinished_character(data)
        missing = self._vocabulary.missing_bytes
        if owed and missing and any(byte in missing for byte in data[-owed:]):
            return len(data) - owed
        return len(data)

    def _encode_tail(self, stop: int) -> int:
        """Encode the source up to `stop`, from a safe cut among the confirmed ids."""
        cut = self._safe_cut()
        start = self._end_of(cut)
        new_ids, new_ends = self._encode(start, stop)
        if not new_ids:  # nothing that the draft can spell
            self.covered = stop
            return self.num_confirmed
        same = cut
        for draft_id, end in zip(new_ids, new_ends, strict=True):
            if same >= self.num_confirmed or self.ids[same] != draft_id or self._ends[same] != end:
                break
            same += 1
        self.ids[same:] = new_ids[same - cut :]
        self._ends[same:] = new_ends[same - cut :]
        self._ends[-1] = self.covered = stop
        self.num_confirmed = len(self.ids)
        return same

    def _safe_cut(self) -> int:
        """How many ids stand before the safe cut: the last one at a pre-token boundary nearby.

        Without one (Chinese, Thai, base64) it is the last one that ends with a character.
        """
        data, marks = self._source.data, self._source.marks
        last = self.num_confirmed
        lowest = max(self._num_fixed, last - MAX_CUT_TOKENS)
        for count in range(last, lowest - 1, -1):
            end = self._end_of(count)
            if self.covered - end > MAX_CUT_BYTES:
                break
            if starts_word(data, end) or end in marks or end - 1 in marks or end == self._base:
                return count
        for count in range(last, lowest - 1, -1):
            end = self._end_of(count)
            if end >= len(data) or data[end] & 0xC0 != 0x80:
                return count
        return last

    def _encode(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Ids of source[start:stop] with their ends in the source."""
        data, marks = self._source.data, self._source.marks
        at_marks = [at for at in marks if start <= at < stop] if marks else []
        ids: list[int] = []
        ends: list[int] = []
        for at in [*at_marks, stop]:
            if at > start:
                continuation = self._continuation or start > 0
                part, part_ends = self._vocabulary.encode_with_ends(
                    bytes(data[start:at]), continuation=continuation
                )
                ids += part
                ends += [start + end for end in part_ends]
            if at < stop:
                ids.append(marks[at])
                ends.append(at + 1)
            start = at + 1
        return ids, ends

    def drop_front(self, keep: int, num_fixed: int) -> int:
        """Keep `num_fixed` ids at the front and about `keep` at the end, from a word start on.

        Returns:
            How many ids were dropped.
        """
        first = max(num_fixed, len(self.ids) - keep)
        for index in range(first, min(first + keep // 4, self.num_confirmed)):
            if starts_word(self._source.data, self._end_of(index)):
                first = index
                break
        first = min(first, self.num_confirmed)
        dropped = first - num_fixed
        if dropped <= 0:
            return 0
        self._base = max(self._base, self._end_of(first))
        del self.ids[num_fixed:first]
        del self._ends[num_fixed:first]
        self._num_fixed = num_fixed
        self.num_confirmed -= dropped
        return dropped
