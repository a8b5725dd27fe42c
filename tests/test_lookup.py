"""Lookup drafts: longest match first, exact re-synchronisation, lean."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydraft.drafter import DraftContext
from anydraft.drafters.lookup import LookupDrafter, SuffixAutomaton


def longest_earlier_suffix(text: list[int]) -> int:
    """Brute force: length of the longest suffix that also ends before the last position."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


def new_session(drafter: LookupDrafter):
    return drafter.new_session(DraftContext(prompt_ids=[], sampling=None))


def ask(drafter, session, tokens, count):
    return drafter.draft([(session, tokens, count)])[0].token_ids


@given(st.lists(st.integers(0, 3), max_size=60))
def test_match_is_the_longest_suffix_seen_before(text):
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.append(token)
        length, start = automaton.match()
        assert length == longest_earlier_suffix(text[:end])
        if length:
            assert start < end
            assert text[start - length : start] == text[end - length : end]


def test_verbatim_copy_is_drafted_at_full_length():
    source = list(range(100, 200))
    drafter = LookupDrafter()
    session = new_session(drafter)
    tokens = [*source, 1, 2, *source[:20]]
    assert ask(drafter, session, tokens, 31) == source[20:51]


def test_most_recent_occurrence_wins():
    drafter = LookupDrafter(min_match=2)
    tokens = [5, 6, 70, 1, 5, 6, 80, 2, 5, 6]
    assert ask(drafter, new_session(drafter), tokens, 1) == [80]


def test_longest_match_wins_over_the_most_recent():
    drafter = LookupDrafter(min_match=1)
    tokens = [4, 5, 6, 70, 1, 9, 6, 80, 2, 4, 5, 6]
    assert ask(drafter, new_session(drafter), tokens, 1) == [70]


def test_periodic_text_goes_on_beyond_its_end():
    drafter = LookupDrafter()
    tokens = [1, 2, 3] * 4
    assert ask(drafter, new_session(drafter), tokens, 10) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert ask(drafter, new_session(drafter), [7] * 9, 31) == [7] * 31


def test_draft_length_grows_with_the_match():
    drafter = LookupDrafter(min_match=2, sure_match=6)
    tail = list(range(10, 60))
    for size, expected in ((2, 2), (5, 5), (6, 31), (9, 31)):
        copied = list(range(100, 100 + size))
        assert len(ask(drafter, new_session(drafter), [*copied, *tail, *copied], 31)) == expected
    assert len(ask(LookupDrafter(max_draft=3), new_session(drafter), tail * 2, 31)) == 3


def test_nothing_to_draft():
    drafter = LookupDrafter(min_match=3)
    session = new_session(drafter)
    assert ask(drafter, session, [], 4) == []
    assert ask(drafter, session, [1], 4) == []
    assert ask(drafter, session, [1, 2, 9, 1, 2], 4) == []
    assert ask(drafter, session, [1, 2, 3, 9, 1, 2, 3], 0) == []
    assert ask(drafter, session, [1, 2, 3, 9, 1, 2, 3], 4) == [9, 1, 2]


def test_changing_counts_and_rollback_equal_a_fresh_session():
    rng = random.Random(1)
    drafter = LookupDrafter(min_match=1)
    session = new_session(drafter)
    tokens: list[int] = []
    for _ in range(300):
        if rng.random() < 0.15:
            tokens = tokens[: rng.randrange(len(tokens) + 1)]  # another object, shorter
        elif tokens and rng.random() < 0.1:
            del tokens[len(tokens) // 2 :]  # the same object, shorter
        tokens.extend(rng.randrange(3) for _ in range(rng.randrange(4)))
        count = rng.choice([4, 0, 4, 12])
        got = ask(drafter, session, tokens, count)
        session_text = session.synchronise(tokens).text
        assert session_text == tokens
        length, _ = session.synchronise(tokens).match()
        assert len(got) == (min(count, length if length < 6 else 99) if length else 0)


def test_sessions_do_not_mix():
    drafter = LookupDrafter()
    one, two = new_session(drafter), new_session(drafter)
    first, second = drafter.draft([(one, [1, 2, 3, 4, 1, 2], 2), (two, [1, 2, 9, 9, 1, 2], 2)])
    assert first.token_ids == [3, 4]
    assert second.token_ids == [9, 9]


def test_ends_of_turn_are_copied_like_any_id():
    drafter = LookupDrafter()
    assert ask(drafter, new_session(drafter), [5, 6, 1, 7, 5, 6], 1) == [1]


def test_cost_per_token_does_not_grow():
    rng = random.Random(2)
    drafter = LookupDrafter()
    session = new_session(drafter)
    tokens = [rng.randrange(500) for _ in range(20_000)]
    started = time.perf_counter()
    ask(drafter, session, tokens, 4)
    built = (time.perf_counter() - started) / len(tokens)
    started = time.perf_counter()
    for _ in range(500):
        tokens.append(rng.randrange(500))
        ask(drafter, session, tokens, 4)
    each = (time.perf_counter() - started) / 500
    assert built < 40e-6
    assert each < 100e-6  # far below one pass of any model; typically 5 us


def test_absurd_parameters_are_refused():
    for wrong in ({"min_match": 0}, {"max_draft": -1}, {"sure_match": 0}):
        with pytest.raises(ValueError, match="min_match"):
            LookupDrafter(**wrong)
