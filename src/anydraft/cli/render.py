"""How answers and statistics look in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

from anydraft.errors import RequestError

if TYPE_CHECKING:
    from anydraft.engine import Chunk, Generation
    from anydraft.output import TokenLogprob
    from anydraft.stats import Stats
    from anydraft.vocabulary import Vocabulary

DRAFT, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# What a model says must not be able to steer the terminal: control characters are made visible.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


def use_color(when: str, stream: IO[str]) -> bool:
    """Whether to write colours to a stream.

    Raises:
        RequestError: `when` is none of auto, always and never.
    """
    if when not in ("auto", "always", "never"):
        raise RequestError(f"--color must be auto, always or never, not {when!r}")
    if when == "auto":
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"


def visible(text: str) -> str:
    """Text that cannot steer the terminal."""
    return text.translate(_VISIBLE)


def note(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


class DraftSpans:
    """Which characters of one answer the draft foresaw.

    A character belongs to the token that holds its first byte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._data = b""  # bytes of tokens whose text is still to come, and per byte its origin
        self._origin: list[bool] = []

    def split(self, chunk: Chunk) -> list[tuple[str, bool]]:
        """The chunk's text in pieces, each with whether it came from the draft."""
        for token_id, from_draft in zip(chunk.token_ids, chunk.from_draft, strict=True):
            data = self._token_bytes[token_id] or b""
            self._data += data
            self._origin += [from_draft] * len(data)
        pieces: list[tuple[str, bool]] = []
        at = 0
        for character, length in zip(chunk.text, _lengths(chunk.text, self._data), strict=True):
            from_draft = at < len(self._origin) and self._origin[at]
            at += length
            if pieces and pieces[-1][1] == from_draft:
                pieces[-1] = (pieces[-1][0] + character, from_draft)
            else:
                pieces.append((character, from_draft))
        self._data, self._origin = self._data[at:], self._origin[at:]
        return pieces


def _lengths(text: str, data: bytes) -> Iterator[int]:
    """For each character the number of bytes of `data` that it stands for."""
    at = 0
    for character in text:
        encoded = character.encode()
        length = len(encoded)
        if character == "\N{REPLACEMENT CHARACTER}" and not data.startswith(encoded, at):
            try:  # broken bytes; the decoder says how many of them one U+FFFD stands for
                data[at : at + 4].decode()
            except UnicodeDecodeError as error:
                length = max(1, error.end - error.start)
        at += length
        yield length


class AnswerPrinter:
    """Writes answers to a stream as they come; of several the first live, the others in turn.

    Args:
        stream: where the text goes.
        vocabulary: the target's.
        show_draft: colour what the draft foresaw.
        count: how many answers there will be; several are headed by their numbers.
    """

    def __init__(
        self, stream: IO[str], vocabulary: Vocabulary, *, show_draft: bool, count: int = 1
    ) -> None:
        self._stream = stream
        self._visible = stream.isatty()
        self._spans = [DraftSpans(vocabulary) if show_draft else None for _ in range(count)]
        self._held: list[list[str]] = [[] for _ in range(count)]
        if count > 1:
            self._held[0].append("[1]\n")
        self._ended = [False] * count
        self._current = 0
        self._begun = False

    def push(self, chunk: Chunk) -> None:
        """Show a chunk, or keep it until its answer's turn comes."""
        self._begun = True
        self._held[chunk.choice].append(self._paint(chunk))
        self._ended[chunk.choice] = chunk.finish_reason is not None
        while self._current < len(self._held):
            self._stream.write("".join(self._held[self._current]))
            self._held[self._current].clear()
            if not self._ended[self._current]:
                break
            self._stream.write("\n")
            self._current += 1
            if self._current < len(self._held):
                self._stream.write(f"\n[{self._current + 1}]\n")
        self._stream.flush()

    def abandon(self) -> None:
        """End the line of an answer that has no last chunk."""
        if self._begun and self._current < len(self._held):
            self._stream.write("\n")
            self._stream.flush()

    def _paint(self, chunk: Chunk) -> str:
        spans = self._spans[chunk.choice]
        pieces = [(chunk.text, False)] if spans is None else spans.split(chunk)
        if self._visible:
            pieces = [(visible(text), drafted) for text, drafted in pieces]
        return "".join(f"{DRAFT}{text}{RESET}" if drafted else text for text, drafted in pieces)


def stats_lines(answers: Sequence[Stats], *, draft: str | None) -> list[str]:
    """The statistics of one request for people, in at most five lines; answers are summed up."""
    stats = add_up(answers)
    seconds = stats.total_seconds
    lines = [
        f"{stats.generated_tokens} tokens in {seconds:.2f} s: {stats.tokens_per_second:.1f} "
        f"tokens/s after the first round ({stats.first_token_seconds:.2f} s, "
        f"prompt of {stats.prompt_tokens} tokens)"
    ]
    if draft is not None:
        lines.append(
            f"draft {draft}: {stats.draft_n_accepted} of {stats.draft_n} drafted tokens accepted; "
            f"{stats.rounds} rounds, {stats.tokens_per_round:.2f} tokens per round"
        )
        if stats.acceptance:
            lines.append(f"acceptance by position: {acceptance(stats.acceptance)}")
    if seconds > 0:
        parts = {"target": stats.target_seconds}
        if draft is not None:
            parts["draft"] = stats.draft_seconds
        parts["other"] = seconds - sum(parts.values())
        shares = ", ".join(f"{name} {part / seconds:.0%}" for name, part in parts.items())
        lines.append(f"time: {shares}")
    if stats.draft_error is not None:
        lines.append(f"the draft failed and the target went on alone: {stats.draft_error}")
    return lines


def add_up(answers: Sequence[Stats]) -> Stats:
    """The statistics of several answers as if they were one."""
    from anydraft.stats import Stats

    if len(answers) == 1:
        return answers[0]
    total = Stats(prompt_tokens=answers[-1].prompt_tokens)
    for stats in answers:
        for name in (
            "generated_tokens rounds draft_n draft_n_accepted draft_seconds target_seconds "
            "overhead_seconds first_token_seconds first_round_tokens"
        ).split():
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for name in ("rounds_by_drafted", "drafted_at", "accepted_at"):
            pairs = zip_longest(getattr(total, name), getattr(stats, name), fillvalue=0)
            setattr(total, name, [a + b for a, b in pairs])
        total.draft_error = total.draft_error or stats.draft_error
    return total


def acceptance(rates: Sequence[float], most: int = 12) -> str:
    """Acceptance by position, short."""
    shown = " ".join(f"{rate:.2f}" for rate in rates[:most])
    return shown + (" …" if len(rates) > most else "")


def generation_fields(
    generation: Generation, vocabulary: Vocabulary, *, from_draft: bool
) -> dict[str, Any]:
    """One answer under its wire names."""
    result: dict[str, Any] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "stats": generation.stats.to_dict(),
    }
    if generation.logprobs is not None:
        result["logprobs"] = [_logprob_fields(entry, vocabulary) for entry in generation.logprobs]
    if from_draft:
        result["from_draft"] = generation.from_draft
    return result


def _logprob_fields(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.token_bytes[token_id]
        text = vocabulary.control_text.get(token_id, "") if data is None else None
        return {
            "token_id": token_id,
            "token": text if data is None else data.decode("utf-8", "replace"),
            # JSON has no minus infinity; null says that the token was forbidden.
            "logprob": logprob if logprob > float("-inf") else None,
        }

    return {
        **token(entry.token_id, entry.logprob),
        "law_logprob": entry.law_logprob,
        "top": [token(token_id, logprob) for token_id, logprob in entry.top],
    }
