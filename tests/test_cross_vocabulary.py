"""Drafting across vocabularies: byte-exact, O(K) a round, and never an error."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

import tokenizers_for_tests as small
from anydraft.backends.toy import ToyModel, random_logits
from anydraft.drafter import DraftContext
from anydraft.drafters import make_drafter
from anydraft.drafters.bridge import starts_word, unfinished_character
from anydraft.drafters.cross_vocabulary import CrossVocabularyDrafter
from anydraft.drafters.retokenise import Retokeniser
from anydraft.errors import StateError, VocabularyError
from anydraft.sampling import SamplingParams
from anydraft.vocabulary import Vocabulary
from drafting import TEXT, follow, generate, reader
from toys import TARGET, toy_target

GREEDY = SamplingParams()
PAIRS = [
    ("byte_level", "sentencepiece_bpe"),
    ("sentencepiece_bpe", "byte_level"),
    ("unigram", "byte_level"),
    ("byte_level", "unigram"),
    ("byte_level", "byte_level_with_prefix"),
    ("sentencepiece_bpe", "unigram_nfkc"),
    ("unigram_nfkc", "sentencepiece_bpe"),
    ("byte_level", "split_digits"),
]
EXACT = [(t, d) for t, d in PAIRS if "nfkc" not in t + d]


def new_session(drafter, prompt_ids, params=GREEDY, **fields):
    return drafter.new_session(DraftContext(prompt_ids, params, **fields))


def ask(drafter, session, tokens, count):
    return drafter.draft([(session, list(tokens), count)])[0].token_ids


def check_text(session):
    """The draft's ids spell the source, its state holds a prefix of them, nothing failed."""
    text = session._text
    vocabulary = session._bridge.draft
    assert session.failures == 0, session.failure
    assert session._state.tokens == session.ids[: session._state.length]
    said = vocabulary.decode(text.ids[text._num_fixed : text.num_confirmed])
    source = bytes(session._source.data[text._base : text.covered])
    assert said in (source, b" " + source)  # with a dummy prefix, once, at the start
    assert text._ends == sorted(text._ends)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_draft_that_knows_the_text_is_accepted(target, draft, count):
    vocabulary = small.vocabulary(target)
    drafter = CrossVocabularyDrafter(reader(small.vocabulary(draft), TEXT), vocabulary)
    answer = vocabulary.encode_prompt(TEXT)
    start = 8
    session = new_session(drafter, answer[:start])
    run = follow(drafter, session, answer, start, [count] * 500)
    assert session.failures == 0, session.failure
    # Only the last piece of a draft may miss: the draft would have made it longer.
    assert run.rate() > {1: 0.35, 4: 0.45, 8: 0.65}[count]
    assert sum(right > 0 for right in run.accepted) > {1: 0.35, 4: 0.7, 8: 0.9}[count] * len(
        run.fed
    )
    assert sum(map(len, run.drafted)) > 0.45 * count * len(run.fed)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_tokens_processed_per_round_do_not_grow(target, draft):
    vocabulary = small.vocabulary(target)
    long_text = " ".join(f"{TEXT} {i}" for i in range(20))
    drafter = CrossVocabularyDrafter(reader(small.vocabulary(draft), TEXT), vocabulary)
    answer = vocabulary.encode_prompt(long_text)
    session = new_session(drafter, answer[:6])
    run = follow(drafter, session, answer, 6, [4] * 3000)
    assert len(answer) > 1500
    # What was accepted and the target's own token, at most a cut's worth again, and the drafts.
    assert max(run.fed[1:]) <= 4 * 8 + 16 + 4
    assert sum(run.fed[1:]) / len(run.fed[1:]) < 14
    half = len(run.fed) // 2
    assert sum(run.fed[half:]) < 1.15 * sum(run.fed[1 : half + 1])


@pytest.mark.parametrize(("target", "draft"), [p for p in EXACT if "prefix" not in p[1]])
def test_the_draft_reads_exactly_the_bytes_of_the_target(target, draft):
    vocabulary = small.vocabulary(target)
    drafter = CrossVocabularyDrafter(reader(small.vocabulary(draft), TEXT), vocabulary)
    answer = vocabulary.encode_prompt(TEXT)
    session = new_session(drafter, answer[:3])
    for length in range(3, len(answer)):
        ask(drafter, session, answer[:length], 3)
        check_text(session)


@pytest.mark.parametrize(("target", "draft"), EXACT)
def test_random_drafts_rollbacks_and_changing_counts_equal_a_fresh_session(target, draft):
    source = random.Random(5)
    vocabulary, other = small.vocabulary(target), small.vocabulary(draft)
    ordinary = np.flatnonzero(vocabulary.kinds <= 1).tolist()
    model = ToyModel(other, random_logits(other.size, 3))
    drafter = CrossVocabularyDrafter(model, vocabulary)
    answer = vocabulary.encode_prompt(TEXT)
    session = new_session(drafter, answer[:2])
    tokens = answer[:2]
    for _ in range(60):
        if source.random() < 0.2 and len(tokens) > 2:
            tokens = tokens[: source.randrange(2, len(tokens))]
        tokens = tokens + [
            source.choice(ordinary) if source.random() < 0.3 else answer[len(tokens) % len(answer)]
            for _ in range(source.randrange(1, 5))
        ]
        ask(drafter, session, tokens, source.choice([4, 0, 4, 1]))
        if session._text is not None and not other.missing_bytes:
            assert session.failures == 0, session.failure
            assert session._state.tokens == session.ids[: session._state.length]
    assert session.failures == 0, session.failure


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.95)])
@pytest.mark.parametrize("counts", [(1,), (4,), (8,), (4, 0, 4)])
def test_tokens_are_those_of_plain_decoding(params, counts):
    target = toy_target()
    other = small.vocabulary("byte_level")
    drafter = CrossVocabularyDrafter(ToyModel(other, random_logits(other.size, 9)), TARGET)
    plain, _ = generate(target, None, [0, 1], params, (0,))
    drafted, sequence = generate(target, drafter, [0, 1], params, counts)
    assert drafted == plain
    assert sequence.stats.draft_error is None
    assert sequence.session.failures == 0, sequence.session.failure


def test_outstanding_drafts_cost_no_pass():
    vocabulary = small.vocabulary("sentencepiece_bpe")
    model = reader(small.vocabulary("byte_level"), TEXT)
    drafter = CrossVocabularyDrafter(model, vocabulary)
    answer = vocabulary.encode_prompt(TEXT)
    session = new_session(drafter, answer[:8])
    assert ask(drafter, session, answer[:8], 6) == answer[8:14]
    fed = session.tokens_processed
    assert ask(drafter, session, answer[:9], 3) == answer[9:12]
    assert session.tokens_processed == fed
    assert ask(drafter, session, answer[:8], 2) == answer[8:10]


def test_prompt_edges():
    vocabulary = small.vocabulary("byte_level")  # no bos, so a prompt can be empty
    for kind in ("sentencepiece_bpe", "byte_level_with_prefix", "unigram"):
        drafter = CrossVocabularyDrafter(reader(small.vocabulary(kind), TEXT), vocabulary)
        for prompt in ([], vocabulary.encode(b"T"), vocabulary.encode(b" ")):
            session = new_session(drafter, prompt)
            ask(drafter, session, prompt, 4)
            assert session.failures == 0, session.failure
        answer = vocabulary.encode(TEXT.encode())
        session = new_session(drafter, answer[:1])
        assert follow(drafter, session, answer, 1, [4] * 20).rate() > 0.5


def test_exactly_one_bos_and_none_of_the_targets():
    target, other = small.vocabulary("unigram"), small.vocabulary("sentencepiece_bpe")
    drafter = CrossVocabularyDrafter(reader(other, TEXT), target)
    answer = target.encode_prompt(TEXT)
    assert answer[0] == target.bos_id
    session = new_session(drafter, answer[:5])
    follow(drafter, session, answer, 5, [4] * 6)
    assert session.ids.count(other.bos_id) == 1
    assert session.ids[0] == other.bos_id


def test_controls_are_fed_by_role_or_as_their_spelling():
    target = Vocabulary.from_tokens(
        [b"a", b"b", b" ", None, None], eos_ids=[3], controls={3: "<e>", 4: "<odd>"}
    )
    other = Vocabulary.from_tokens(
        [bytes([i]) for i in range(256)] + [None], eos_ids=[256], controls={256: "<stop>"}
    )
    drafter = CrossVocabularyDrafter(ToyModel(other, random_logits(257, 1)), target)
    session = new_session(drafter, [0])
    ask(drafter, session, [0, 3, 1, 4, 0], 2)
    confirmed = session.ids[: session._text.num_confirmed]
    assert confirmed == [97, 256, 98, *b"<odd>", 97]
    assert session.failures == 0
    ask(drafter, session, [0, 3, 0], 2)  # back to before <odd>, over the mark
    assert session.ids[: session._text.num_confirmed] == [97, 256, 97]
    ask(drafter, session, [0, 0], 2)
    assert session.ids[: session._text.num_confirmed] == [97, 97]


def test_the_drafts_end_proposes_the_targets():
    vocabulary, other = small.vocabulary("byte_level"), small.vocabulary("unigram")
    drafter = CrossVocabularyDrafter(reader(other, "Short text."), vocabulary)
    answer = [*vocabulary.encode(b"Short text."), vocabulary.roles["eos"]]
    session = new_session(drafter, answer[:2])
    assert ask(drafter, session, answer[:-1], 4) == [vocabulary.roles["eos"]]
    assert ask(drafter, session, answer[:-2], 4)[-1] == vocabulary.roles["eos"]


def test_the_spelling_of_a_control_proposes_the_control():
    vocabulary, other = small.vocabulary("byte_level"), small.vocabulary("unigram")
    drafter = CrossVocabularyDrafter(reader(other, "A text.<|im_end|> More"), vocabulary)
    tokens = vocabulary.encode(b"A text.")
    session = new_session(drafter, tokens[:1])
    assert ask(drafter, session, tokens, 12) == [vocabulary.roles["eos"]]  # nothing after an end
    parts = Retokeniser(vocabulary)._split_at_controls(b"a<|im_start|>b<|im_end|>")
    start, end = vocabulary.roles["start_of_turn"], vocabulary.roles["eos"]
    assert parts == [b"a", start, b"b", end]
    assert Retokeniser(vocabulary)._split_at_controls(b"a <| b") == [b"a <| b"]


def test_messages_go_through_the_drafts_own_template():
    target, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    messages = [{"role": "user", "content": "Tell me of steam. <|im_end|>"}]
    prompt = target.encode_chat(messages)
    drafter = CrossVocabularyDrafter(reader(other, TEXT), target)
    session = new_session(drafter, prompt, messages=messages)
    template = other.encode_chat(messages)
    answer = prompt + target.encode(TEXT.encode())
    run = follow(drafter, session, answer, len(prompt) + 4, [4] * 30)
    assert session.ids[: len(template)] == template
    assert session.failures == 0
    assert run.rate() > 0.7


def test_without_a_template_the_draft_reads_a_transcript():
    target, other = small.vocabulary("byte_level"), small.vocabulary("unigram")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    drafter = CrossVocabularyDrafter(reader(other, TEXT), target)
    session = new_session(drafter, [1, 2], messages=messages)
    ask(drafter, session, [1, 2], 2)
    said = other.decode(session.ids[: session._text.num_confirmed])
    assert said.strip() == b"user: Hello\nassistant: Hi\nassistant:"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe", "byte_level_with_prefix"])
def test_half_characters(kind):
    """The target's text stops inside an emoji: drafts begin with the bytes that are owed."""
    byte_ids = Vocabulary.from_tokens(
        [bytes([i]) for i in range(256)] + [None], eos_ids=[256], name="bytes"
    )
    text = "A smile 😀 and 世界 too 👍 is here."
    answer = list(text.encode())
    drafter = CrossVocabularyDrafter(reader(small.vocabulary(kind), text), byte_ids)
    session = new_session(drafter, answer[:4])
    for length in range(4, len(answer) - 1):
        ids = ask(drafter, session, answer[:length], 4)
        assert session.failures == 0, session.failure
        owed = unfinished_character(bytes(answer[:length]))
        if owed and ids:
            assert ids[0] & 0xC0 == 0x80
        if kind != "byte_level_with_prefix":
            assert ids[:2] == answer[length : length + 2]


def test_a_draft_never_stops_inside_a_character():
    byte_ids = Vocabulary.from_tokens(
        [bytes([i]) for i in range(256)] + [None], eos_ids=[256], name="bytes"
    )
    drafter = CrossVocabularyDrafter(reader(byte_ids, TEXT), small.vocabulary("sentencepiece_bpe"))
    target = small.vocabulary("sentencepiece_bpe")
    tokens = target.encode_prompt(TEXT[: TEXT.index("世界")])
    ids = ask(drafter, new_session(drafter, tokens), tokens, 1)
    assert target.decode(ids) in ("世".encode(), "世界".encode(), "世".encode()[:1])
    session = new_session(drafter, tokens)
    ask(drafter, session, tokens, 1)
    assert session._text.drafted == "世".encode()


def test_committed_ids_are_never_altered():
    """Non-canonical ids of the target stay as they are; the draft goes on after them."""
    tokens = [b"a", b"b", b"ab", b" ", b" ab", b"c", None]
    target = Vocabulary.from_tokens(tokens, eos_ids=[6])
    retokeniser = Retokeniser(target)
    assert retokeniser.candidates([3, 0], b"b c") == [1, 3, 5]  # " a" + "b", not " ab"
    assert retokeniser.candidates([5], b" ab") == [4]
    assert retokeniser.candidates([], b" ab") == [4]
    assert retokeniser.candidates([6], b"ab") == [2]


def test_retokenising_in_context_after_half_a_character():
    vocabulary = small.vocabulary("sentencepiece_bpe")
    retokeniser = Retokeniser(vocabulary)
    smile = "😺".encode()
    pieces = vocabulary.encode(smile)
    assert len(pieces) == 4  # not in the corpus, so four byte tokens
    context = [*vocabulary.encode(b"The"), *pieces[:2]]
    assert retokeniser.candidates(context, smile[2:] + b" work")[:2] == pieces[2:]
    assert retokeniser.candidates(context, b" work") == []


@pytest.mark.parametrize("window", [6, 16, 40])
def test_a_shorter_window_slides(window):
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    model = reader(other, TEXT, max_length=window)
    drafter = CrossVocabularyDrafter(model, vocabulary)
    answer = vocabulary.encode_prompt(TEXT)
    start = len(answer) // 3  # longer than the window
    session = new_session(drafter, answer[:start])
    run = follow(drafter, session, answer, start, [4] * 500)
    assert session.failures == 0, session.failure
    assert max(map(len, run.drafted)) >= 2
    if window >= 16:
        assert run.rate() > 0.6
        assert sum(run.fed) < 8 * (len(answer) - start) + window


def test_k_beyond_the_window():
    vocabulary = small.vocabulary("sentencepiece_bpe")
    drafter = CrossVocabularyDrafter(
        reader(small.vocabulary("byte_level"), TEXT, max_length=4), vocabulary
    )
    answer = vocabulary.encode_prompt(TEXT)
    session = new_session(drafter, answer[:9])
    follow(drafter, session, answer, 9, [16] * 20)
    assert session.failures == 0, session.failure


def test_sessions_share_each_pass():
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    model = reader(other, TEXT)
    passes = []
    extend = model.extend
    model.extend = lambda batch: passes.append(len(batch)) or extend(batch)
    drafter = CrossVocabularyDrafter(model, vocabulary)
    answer = vocabulary.encode_prompt(TEXT)
    sessions = [new_session(drafter, answer[:8]) for _ in range(3)]
    calls = [(sessions[0], answer[:8], 4), (sessions[1], answer[:30], 2), (sessions[2], [], 0)]
    first, second, third = drafter.draft(calls)
    assert first.token_ids == answer[8:12]
    assert second.token_ids in (answer[30:31], answer[30:32])
    assert third.token_ids == []
    assert len(passes) <= 4
    assert passes[0] == 2
    alone = new_session(drafter, answer[:8])
    assert ask(drafter, alone, answer[:8], 4) == first.token_ids


def test_masks_of_the_target_end_a_draft():
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    answer = vocabulary.encode_prompt(TEXT)
    drafter = CrossVocabularyDrafter(reader(other, TEXT), vocabulary)
    banned = answer[10]
    params = SamplingParams(bad_words=((answer[9], banned),))
    session = new_session(drafter, answer[:8], params)
    assert ask(drafter, session, answer[:8], 4)[:3] != answer[8:11]
    session = new_session(drafter, answer[:8], SamplingParams(logit_bias={banned: -math.inf}))
    assert banned not in ask(drafter, session, answer[:8], 4)
    ends = CrossVocabularyDrafter(reader(other, "The"), vocabulary)
    tokens = vocabulary.encode_prompt("The")
    assert ask(ends, new_session(ends, tokens), tokens, 2) == [vocabulary.roles["eos"]]
    for masked in (SamplingParams(ignore_eos=True), SamplingParams(min_tokens=5)):
        session = new_session(ends, tokens, masked)
        assert vocabulary.roles["eos"] not in ask(ends, session, tokens, 2)
        assert session.failures == 0


def test_bans_are_mapped_by_bytes():
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    drafter = CrossVocabularyDrafter(reader(other, TEXT), vocabulary)
    word = tuple(vocabulary.encode(b" engine"))
    mapped = drafter.bridge.sampling_in_draft_ids(
        SamplingParams(
            bad_words=(word, (vocabulary.roles["eos"],)),
            logit_bias={vocabulary.roles["eos"]: 2.0, vocabulary.ids_by_bytes[b"x"]: 1.0},
            processors=(lambda ids, logits: logits,),
        )
    )
    assert other.decode(mapped.bad_words[0]) == b" engine"
    assert mapped.bad_words[1] == (other.roles["eos"],)
    assert mapped.logit_bias == {other.roles["eos"]: 2.0, other.ids_by_bytes[b"x"]: 1.0}
    assert mapped.processors == ()


def test_padding_is_never_drafted():
    vocabulary = small.vocabulary("sentencepiece_bpe", padding=7)
    other = small.vocabulary("byte_level", padding=9)

    def wants_padding(tokens):
        row = np.zeros(other.size)
        row[-1] = 9.0
        row[other.ids_by_bytes[b"x"]] = 5.0
        return row.tolist()

    drafter = CrossVocabularyDrafter(ToyModel(other, wants_padding), vocabulary)
    session = new_session(drafter, [1])
    ids = ask(drafter, session, [1, 5], 3)
    assert vocabulary.decode(ids).replace(b"x", b"") == b""
    assert ids
    assert max(ids) < vocabulary.size - 7


def test_failures_inside_a_session_are_no_candidates():
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    rows = {"nan": True}

    def logits(tokens):
        return [math.nan if rows["nan"] else 0.0] * other.size

    drafter = CrossVocabularyDrafter(ToyModel(other, logits), vocabulary)
    session = new_session(drafter, [1])
    assert ask(drafter, session, [1, 5], 3) == []
    assert session.failures == 1
    assert "NumericsError" in session.failure
    rows["nan"] = False
    assert ask(drafter, session, [1, 5], 3)  # it recovers
    rows["nan"] = True
    for _ in range(5):
        assert ask(drafter, session, [1, 5, 6], 3) == []
    assert session.failures == 4  # and gives up after three in a row


def test_a_broken_model_is_said_aloud():
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    model = reader(other, TEXT)

    def broken(batch):
        raise RuntimeError("device lost")

    model.extend = broken
    drafter = CrossVocabularyDrafter(model, vocabulary)
    with pytest.raises(RuntimeError, match="device lost"):
        ask(drafter, new_session(drafter, [1]), [1, 5], 3)


def test_sessions_are_lazy_and_close_twice():
    vocabulary, other = small.vocabulary("sentencepiece_bpe"), small.vocabulary("byte_level")
    model = reader(other, TEXT)
    drafter = CrossVocabularyDrafter(model, vocabulary)
    session = new_session(drafter, vocabulary.encode_prompt("The steam"))
    assert session._state is None
    assert ask(drafter, session, vocabulary.encode_prompt("The steam"), 0) == []
    assert model.tokens_processed == session.tokens_processed == 0
    ask(drafter, session, vocabulary.encode_prompt("The steam"), 2)
    assert model.tokens_processed == session.tokens_processed > 0
    session.close()
    session.close()
    with pytest.raises(StateError):
        ask(drafter, session, [1], 1)


def test_helpers_on_bytes():
    assert starts_word(b"a b", 1)
    assert not starts_word(b"a  b", 2)
    assert not starts_word(b"ab", 2)
    assert starts_word(b"", 0)
    for character in "é世😀":
        data = character.encode()
        for size in range(len(data)):
            assert unfinished_character(b"x" + data[:size]) == size
        assert unfinished_character(b"x" + data) == 0
    assert unfinished_character(b"\xff") == 0
    assert unfinished_character(b"\x80\x80") == 0


def test_make_drafter_picks_by_vocabulary():
    target = small.vocabulary("byte_level")
    same = ToyModel(target, random_logits(target.size, 1))
    other = reader(small.vocabulary("unigram"), TEXT)
    assert type(make_drafter(same, target)).__name__ == "DraftModelDrafter"
    assert type(make_drafter(other, target)).__name__ == "CrossVocabularyDrafter"
    assert type(make_drafter("lookup", target)).__name__ == "LookupDrafter"
    with pytest.raises(VocabularyError, match="not certain"):
        make_drafter(reader(small.vocabulary("wordpiece"), TEXT, end=0), target)
    with pytest.raises(VocabularyError, match="lookup"):
        make_drafter("look-up", target)


@pytest.mark.slow
def test_acceptance_of_the_real_pair(gemma_path, smollm_path):
    """SmolLM2 drafting for Gemma 3, greedy: at least 0.55 of the first candidates are right."""
    from anydraft.backends import load_model

    target = load_model(gemma_path, dtype="float32")
    drafter = make_drafter(load_model(smollm_path, dtype="float32"), target.vocabulary)
    prompts = [
        "The history of the Roman Empire begins with the founding of",
        'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n <',
        "Question: What is the capital of France?\nAnswer:",
        "La révolution française de 1789 est",
        "1, 2, 3, 4, 5, 6, 7, 8,",
        "中国的首都是",
    ]
    texts = [target.vocabulary.encode_prompt(prompt) for prompt in prompts]
    sessions = [new_session(drafter, ids) for ids in texts]
    states = [target.new_state() for _ in texts]
    lengths = [len(ids) for ids in texts]
    right = 0
    for _ in range(32):
        calls = [(s, tokens, 2) for s, tokens in zip(sessions, texts, strict=True)]
        drafts = drafter.draft(calls)
        rows = target.extend(
            [(state, ids[state.length :], 1) for state, ids in zip(states, texts, strict=True)]
        )
        for tokens, draft, row in zip(texts, drafts, rows, strict=True):
            tokens.append(int(row[0].argmax()))
            right += draft.token_ids[:1] == tokens[-1:]
    for session, length in zip(sessions, lengths, strict=True):
        assert session.failures == 0, session.failure
        assert session.tokens_processed < length * 2 + 32 * 6
    acceptance = right / (32 * len(prompts))
    assert acceptance >= 0.55, acceptance
