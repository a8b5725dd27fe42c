"""Engine: requests in, chunks out; stops, limits, batches, log-probabilities, conversations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from anydraft.backends.toy import ToyModel, random_logits
from anydraft.engine import Conversation, Engine, GenerationRequest
from anydraft.errors import PromptTooLongError, RequestError
from anydraft.vocabulary import Vocabulary
from toys import TARGET, ScriptedDrafter, oracle_drafter, toy_target


def speller(text: bytes, vocabulary: Vocabulary | None = None) -> ToyModel:
    """A model over bytes that says `text` whatever the one-token prompt, then its end token 256."""
    vocabulary = vocabulary or Vocabulary.from_tokens(
        [bytes([i]) for i in range(256)] + [None], eos_ids=[256], name="bytes"
    )

    def row(tokens: tuple[int, ...]) -> list[float]:
        at = len(tokens) - 1
        scores = [0.0] * 257
        scores[text[at] if at < len(text) else 256] = 9.0
        return scores

    return ToyModel(vocabulary, row)


def spelling_engine(text: bytes, count: int) -> Engine:
    ahead = [*text, 256]
    drafter = ScriptedDrafter(lambda tokens, n: ahead[len(tokens) - 1 : len(tokens) - 1 + n])
    return Engine(speller(text), drafter if count else None, count)


TEXT = "a round € table 🚀 says ha ha ha ha end".encode()


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize(
    "stop", [(), ("ha ha ha",), ("🚀",), ("table 🚀",), ("end",), ("x", "says", "s ha"), ("a",)]
)
def test_stops_cut_text_ids_and_counts_alike(count: int, stop: tuple[str, ...]) -> None:
    got = spelling_engine(TEXT, count).generate([0], stop=stop, logprobs=0)
    whole = TEXT.decode()
    cut = min((whole.find(s) for s in stop if s in whole), default=len(whole))
    assert got.text == whole[:cut]
    assert got.finish_reason == "stop"
    assert got.token_ids == [*whole[:cut].encode(), *([256] if cut == len(whole) else [])]
    assert len(got.from_draft) == len(got.token_ids) == len(got.logprobs)
    assert got.stats.generated_tokens == len(got.token_ids)


@pytest.mark.parametrize("count", [0, 3])
def test_streaming_never_shows_half_a_character_or_what_a_stop_may_take_back(count: int) -> None:
    pieces: list[str] = []
    ids: list[int] = []
    for chunk in spelling_engine(TEXT, count).stream([0], stop="ha ha end"):
        assert "\N{REPLACEMENT CHARACTER}" not in chunk.text
        pieces.append(chunk.text)
        ids.extend(chunk.token_ids)
    expected = TEXT.decode().split("ha ha end")[0]
    assert "".join(pieces) == expected
    assert bytes(ids) == expected.encode()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 12])
def test_max_tokens_inside_a_character_gives_a_valid_answer(max_tokens: int) -> None:
    for count in (0, 8):
        got = spelling_engine("€€€€".encode(), count).generate([0], max_tokens=max_tokens)
        assert got.finish_reason == "length"
        assert len(got.token_ids) == max_tokens
        assert got.text == "€€€€".encode()[:max_tokens].decode("utf-8", "replace")


def test_a_model_without_an_end_token_runs_to_its_limit() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"b"])
    engine = Engine(ToyModel(vocabulary, lambda tokens: [1.0, 0.0]))
    got = engine.generate([1], max_tokens=5)
    assert (got.text, got.finish_reason) == ("aaaaa", "length")


def test_the_context_limit_ends_the_answer() -> None:
    target = ToyModel(TARGET, random_logits(TARGET.size, 1), max_length=10)
    answers = []
    for drafter in (None, ScriptedDrafter(lambda tokens, n: [1] * n)):
        got = Engine(target, drafter, 6).generate([0] * 4, max_tokens=50, ignore_eos=True)
        assert len(got.token_ids) == 6
        assert got.finish_reason == "length"
        answers.append(got.token_ids)
    assert answers[0] == answers[1]


def test_prompts_that_cannot_be_served_are_refused_before_anything_runs() -> None:
    engine = Engine(ToyModel(TARGET, random_logits(TARGET.size, 1), max_length=10))
    with pytest.raises(PromptTooLongError, match="10 tokens and the context of toy holds 10"):
        engine.stream([0] * 10)
    for empty in ("", b""):
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.stream(empty)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.generate([99])
    with pytest.raises(RequestError, match="list of prompts is empty"):
        engine.generate([])


def test_an_empty_prompt_starts_from_bos_where_there_is_one() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"b", None], bos_id=2)
    engine = Engine(ToyModel(vocabulary, lambda tokens: [1.0, 0.0, 0.0]))
    assert engine.generate("", max_tokens=2).text == "aa"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n must"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_draft_tokens": 10**6}, "num_draft_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "either a prompt or messages"),
        ({"warmth": 1}, "unknown parameter 'warmth'"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Engine(toy_target()).generate([0], **fields)


def test_batches_and_choices_give_each_what_it_gets_alone() -> None:
    target = toy_target(seed=9)
    plain = Engine(target)
    prompts = [[0], [4, 5, 6, 0, 1], [2, 2]]
    request = {"max_tokens": 25, "temperature": 1.0, "seed": 3}
    alone = [plain.generate(p, **request).token_ids for p in prompts]
    drafter = oracle_drafter(plain, {"prompt": prompts[1], **request}, wrong_every=4)
    for engine in (plain, Engine(target, drafter, 5)):
        assert [g.token_ids for g in engine.generate(prompts, **request)] == alone
    many = Engine(target, drafter, 5).generate(prompts, **request, n=2)
    assert [(g.prompt_index, g.choice) for g in many] == [(i, c) for i in range(3) for c in (0, 1)]
    assert [g.token_ids for g in many if g.choice == 0] == alone
    assert all(isinstance(g, list) is False and g.stats.rounds > 0 for g in many)


def test_two_streams_at_once_do_not_disturb_each_other() -> None:
    engine = spelling_engine(TEXT, 4)
    first, second = engine.stream([0]), engine.stream([0])
    texts = ["", ""]
    for a, b in zip(first, second, strict=True):
        texts[0] += a.text
        texts[1] += b.text
    assert texts == [TEXT.decode()] * 2


def test_a_seed_is_drawn_and_reported_and_gives_the_answer_again() -> None:
    engine = Engine(toy_target())
    got = engine.generate([0, 1], temperature=1.0, max_tokens=20)
    assert got.seed is not None
    again = engine.generate([0, 1], temperature=1.0, max_tokens=20, seed=got.seed)
    assert again.token_ids == got.token_ids
    assert engine.generate([0, 1], max_tokens=2).seed is None


@pytest.mark.parametrize("count", [0, 4])
def test_logprobs_come_from_the_targets_laws(count: int) -> None:
    target = toy_target(seed=6)
    plain = Engine(target)
    request = {"prompt": [0, 3], "max_tokens": 20, "temperature": 0.8, "top_k": 4, "seed": 2}
    engine = Engine(target, oracle_drafter(plain, request, wrong_every=3), count)
    got = engine.generate(**request, logprobs=3)
    tokens = [0, 3]
    for item, token_id in zip(got.logprobs, got.token_ids, strict=True):
        row = torch.tensor(target.logits_fn(tuple(tokens)), dtype=torch.float32).double()
        expected = torch.log_softmax(row, 0)
        assert item.token_id == token_id
        assert item.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert [i for i, _ in item.top] == expected.topk(3).indices.tolist()
        row[12] = -math.inf
        best = (row / 0.8).topk(4)
        law = torch.log_softmax(best.values, 0)[best.indices.tolist().index(token_id)]
        assert item.law_logprob == pytest.approx(float(law), abs=1e-5)
        tokens.append(token_id)


def test_a_conversation_processes_what_is_new_only() -> None:
    target = toy_target(seed=3)
    engine = Engine(target)
    conversation = Conversation()
    first = engine.generate([0, 1, 2], max_tokens=10, ignore_eos=True, conversation=conversation)
    before = target.tokens_processed
    history = [0, 1, 2, *first.token_ids, 4, 5]
    warm = engine.generate(history, max_tokens=10, ignore_eos=True, conversation=conversation)
    assert target.tokens_processed - before == 3 + 9  # the last answer's end, the new part, 9 steps
    assert warm.token_ids == engine.generate(history, max_tokens=10, ignore_eos=True).token_ids
    other = engine.generate([0, 9], max_tokens=4, ignore_eos=True, conversation=conversation)
    assert other.token_ids == engine.generate([0, 9], max_tokens=4, ignore_eos=True).token_ids
    conversation.close()
    with pytest.raises(RequestError, match="one prompt"):
        engine.generate([0], n=2, conversation=conversation)


def test_a_broken_draft_leaves_the_answer_and_is_said() -> None:
    def fails(tokens: list[int], count: int) -> list[int]:
        raise RuntimeError("gone")

    drafter = ScriptedDrafter(fails)
    got = Engine(speller(TEXT), drafter, 4).generate([0])
    assert got.text == TEXT.decode()
    assert got.stats.draft_error == "RuntimeError: gone"
    assert got.stats.to_dict()["draft_error"] == "RuntimeError: gone"
    assert drafter.closed_sessions == 1


def test_a_stream_that_is_dropped_frees_its_states() -> None:
    target = speller(TEXT)
    states: list[Any] = []
    make = target.new_state
    target.new_state = lambda: states.append(make()) or states[-1]  # type: ignore
    stream = Engine(target).stream([0])
    next(stream)
    stream.close()
    assert [state.closed for state in states] == [True]


def test_requests_are_checked_when_made() -> None:
    assert GenerationRequest(prompt="x", stop="end").stop == ("end",)
    with pytest.raises(RequestError):
        GenerationRequest()
