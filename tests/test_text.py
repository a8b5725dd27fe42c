"""Text comes out whole: characters, stop strings, whatever the tokens are."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anydraft.errors import RequestError
from anydraft.text import TextStream, unfinished_bytes

EMOJI = "👍🏽".encode()


def run(pieces: list[bytes], stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    stream = TextStream(stop or [])
    texts = []
    for piece in pieces:
        text, stopped = stream.push(piece)
        texts.append(text)
        if stopped:
            break
    texts.append(stream.flush())
    return texts, stream


def kept(pieces: list[bytes], stream: TextStream) -> int:
    """Tokens that survive, by the rule that TextStream states."""
    cut = stream.stop_offset
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    return len(pieces) if cut is None else sum(start < cut for start in starts)


def test_a_character_comes_only_when_finished() -> None:
    texts, _ = run([EMOJI[i : i + 1] for i in range(len(EMOJI))])
    assert texts == ["", "", "", "👍", "", "", "", "🏽", ""]


def test_what_cannot_be_finished_is_replaced_at_once() -> None:
    # Half an emoji, then a letter: no waiting for bytes that can no longer come.
    stream = TextStream()
    assert stream.push(EMOJI[:2]) == ("", False)
    assert stream.push(b" a") == ("\ufffd a", False)
    assert stream.push(b"\x80") == ("\ufffd", False)
    assert stream.flush() == ""


def test_the_end_inside_a_character_gives_one_replacement() -> None:
    texts, stream = run([b"ok ", EMOJI[:3]])
    assert texts == ["ok ", "", "\ufffd"]
    assert stream.released_bytes == 6


def test_stop_in_the_middle_of_a_token() -> None:
    pieces = [b"one", b" END two", b" three"]
    texts, stream = run(pieces, ["END"])
    assert "".join(texts) == "one "
    assert stream.stop_offset == 4
    assert kept(pieces, stream) == 2  # the token in which it begins stays


def test_stop_across_tokens() -> None:
    pieces = [b"x", b" ha", b" ha", b" h", b"a", b" never"]
    texts, stream = run(pieces, [" ha ha ha"])
    assert texts == ["x", "", "", "", "", ""]
    assert kept(pieces, stream) == 1  # the token that begins with it goes


def test_a_prefix_that_came_to_nothing_is_released() -> None:
    stream = TextStream(["</s>"])
    assert stream.push(b"a <") == ("a ", False)
    assert stream.push(b"/") == ("", False)
    assert stream.push(b"b>") == ("</b>", False)


def test_overlapping_prefixes_hold_back_the_longest_that_is_possible() -> None:
    stream = TextStream(["aab"])
    assert stream.push(b"aaa") == ("a", False)
    assert stream.push(b"b") == ("", True)
    assert stream.stop_offset == 1
    assert stream.push(b"more") == ("", True)
    assert stream.flush() == ""


def test_the_first_completed_of_several_wins_and_of_equals_the_longest() -> None:
    assert "".join(run([b"xabcd"], ["abcd", "c"])[0]) == "xab"
    assert "".join(run([b"xabcd"], ["bc", "abc", "c"])[0]) == "x"
    assert "".join(run([b"xabcd"], ["abc", "abc"])[0]) == "x"


def test_stop_strings_of_several_bytes_a_character() -> None:
    pieces = ["你好".encode()[:4], "你好".encode()[4:], "世".encode()]
    texts, stream = run(pieces, ["好"])
    assert "".join(texts) == "你"
    assert kept(pieces, stream) == 1


def test_stop_after_half_a_character() -> None:
    texts, stream = run([EMOJI[:2], b"!", b"x"], ["!"])
    assert "".join(texts) == "\ufffd"
    assert stream.stop_offset == 2


@pytest.mark.parametrize("stop", [[""], ["ok", ""], [b"bytes"], [None], ["\ud800"]])
def test_a_stop_string_that_cannot_be_is_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="stop string"):
        TextStream(stop)


def test_one_string_is_one_stop_string() -> None:
    assert "".join(run([b"left right"], "right")[0]) == "left "  # type: ignore[arg-type]


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.text("ab<é👍", max_size=4).map(str.encode),
    ),
    max_size=8,
)
STOPS = st.lists(st.text("ab<é👍", min_size=1, max_size=4), max_size=3)


@settings(deadline=None)
@given(PIECES)
def test_without_stops_it_is_decode(pieces: list[bytes]) -> None:
    texts, stream = run(pieces)
    data = b"".join(pieces)
    assert "".join(texts) == data.decode("utf-8", "replace")
    assert stream.released_bytes == len(data)


@settings(deadline=None)
@given(PIECES, STOPS)
def test_the_cut_into_tokens_does_not_matter(pieces: list[bytes], stops: list[str]) -> None:
    data = b"".join(pieces)
    texts, stream = run(pieces, stops)
    ends = sorted(
        (data.find(stop.encode()) + len(stop.encode()), data.find(stop.encode()))
        for stop in stops
        if stop.encode() in data
    )
    cut = ends[0][1] if ends else None
    assert stream.stop_offset == cut
    assert "".join(texts) == data[:cut].decode("utf-8", "replace")


UNFINISHED = {
    chr(code).encode()[:length]
    for code in range(0x80, 0x110000, 64)
    if not 0xD800 <= code < 0xE000
    for length in range(1, len(chr(code).encode()))
}
"""Every proper prefix of every character. The standard incremental decoder is no oracle: it also
waits after the first two bytes of a surrogate, which nothing can finish."""


@settings(deadline=None)
@given(st.binary(max_size=6))
@example(b"\xed\xa0")
@example("😀".encode()[:3])
def test_unfinished_bytes_are_a_prefix_of_a_character(data: bytes) -> None:
    ends = [data[-length:] for length in range(1, min(3, len(data)) + 1)]
    assert unfinished_bytes(data) == max((len(end) for end in ends if end in UNFINISHED), default=0)
