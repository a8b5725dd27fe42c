"""Bytes to text as they come: no half characters, nothing of a stop string or after it."""

from __future__ import annotations

from collections.abc import Sequence

from anydraft.errors import RequestError


class TextStream:
    """Turns the bytes of tokens into text piece by piece.

    What comes out depends only on the bytes, not on how they were cut into tokens:

    - An unfinished character is held back until it is finished or cannot be; bytes that are no
      UTF-8 become U+FFFD, as bytes.decode(errors="replace") has it.
    - The first stop string to be *completed* ends the text; of several completed by the same byte,
      the longest. What may yet become one is held back.

    Token ids are cut at the same place: keep a token if its first byte lies before `stop_offset`.
    So a token inside which the stop string begins is kept, although its text is cut, and one that
    begins with the stop string, or after it, is dropped.

    Args:
        stop: strings that end the text.

    Raises:
        RequestError: a stop string that is empty or not text.
    """

    __slots__ = ("_held", "_prefixes", "_stops", "released_bytes", "stop_offset")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        self._stops: list[bytes] = []
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"a stop string must be text and not empty, not {text!r}")
            try:
                self._stops.append(text.encode())
            except UnicodeEncodeError:
                raise RequestError(f"the stop string {text!r} is no valid text") from None
        # Longest first: the first that ends the held bytes is what must be held back.
        self._prefixes = sorted(
            {text[:length] for text in self._stops for length in range(1, len(text))},
            key=len,
            reverse=True,
        )
        self._held = b""
        self.released_bytes = 0
        """How many of the bytes pushed are in the text returned so far."""
        self.stop_offset: int | None = None
        """Where the stop string begins, in bytes from the first one pushed; None if none came."""

    def push(self, data: bytes) -> tuple[str, bool]:
        """Take the bytes of one more token.

        Returns:
            The text that has become certain, and whether a stop string is complete. After that,
            whatever is pushed gives ("", True).
        """
        if self.stop_offset is not None:
            return "", True
        self._held += data
        matches = [
            (at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        if matches:
            _, at = min(matches)
            self.stop_offset = self.released_bytes + at
            text = self._release(at)
            self._held = b""
            return text, True
        return self._release(len(self._held) - self._undecided()), False

    def flush(self) -> str:
        """The text still held back, when no more bytes will come: U+FFFD for half a character."""
        return self._release(len(self._held))

    def _undecided(self) -> int:
        """How many of the last bytes may begin a stop string or a character."""
        held = self._held
        for prefix in self._prefixes:
            if held.endswith(prefix):
                return max(len(prefix), unfinished_bytes(held))
        return unfinished_bytes(held)

    def _release(self, length: int) -> str:
        data, self._held = self._held[:length], self._held[length:]
        self.released_bytes += length
        return data.decode("utf-8", "replace")


def unfinished_bytes(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that more bytes could finish (0 to 3)."""
    for length in range(1, min(3, len(data)) + 1):
        if data[-length] & 0xC0 != 0x80:  # a first byte
            try:
                data[-length:].decode()
            except UnicodeDecodeError as error:
                return length if error.reason == "unexpected end of data" else 0
            return 0
    return 0
