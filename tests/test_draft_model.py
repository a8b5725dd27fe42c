"""Drafting in shared ids: exact re-synchronisation, one pass per step, excluded ids."""

from __future__ import annotations

import random

import numpy as np
import pytest

from anydraft.backends.toy import ToyModel, random_logits
from anydraft.drafter import DraftContext
from anydraft.drafters import make_drafter
from anydraft.drafters.draft_model import DraftModelDrafter
from anydraft.noise import Noise
from anydraft.sampling import SamplingParams
from anydraft.vocabulary import Vocabulary, compare
from drafting import follow, generate
from toys import TARGET, toy_target

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=8, repetition_penalty=1.2)


def toy_draft(max_length: int | None = None, seed: int = 1, noise: float = 0.0) -> ToyModel:
    """The target itself, or one that differs from it by `noise`."""
    exact = toy_target(seed).logits_fn
    other = random_logits(TARGET.size, seed + 100)

    def logits(tokens):
        return (np.array(exact(tokens)) + noise * np.array(other(tokens))).tolist()

    return ToyModel(TARGET, logits, max_length)


def new_session(drafter, prompt_ids, params=GREEDY, noise=None):
    return drafter.new_session(DraftContext(prompt_ids, params, noise))


def ask(drafter, session, tokens, count):
    return drafter.draft([(session, list(tokens), count)])[0].token_ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(temperature=1.0)])
@pytest.mark.parametrize("counts", [(1,), (3,), (8,), (4, 0, 4)])
@pytest.mark.parametrize("max_length", [None, 9])
def test_tokens_are_those_of_plain_decoding(params, counts, max_length):
    target = toy_target()
    plain, _ = generate(target, None, [0, 1, 2], params, (0,))
    for drafter in (
        DraftModelDrafter(toy_draft(max_length, noise=0.4)),
        make_drafter(toy_draft(max_length, noise=0.4), TARGET),
    ):
        drafted, sequence = generate(target, drafter, [0, 1, 2], params, counts)
        assert drafted == plain
        assert sequence.stats.draft_error is None
        assert sequence.session.failures == 0, sequence.session.failure
        assert sequence.stats.draft_n_accepted > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_target_as_its_own_draft_is_always_right(params):
    target = toy_target()
    drafter = DraftModelDrafter(toy_draft())
    _, sequence = generate(target, drafter, [0, 1], params, (4,), num_tokens=60)
    stats = sequence.stats
    assert stats.draft_n_accepted >= stats.draft_n - 4  # but for what comes after the limit
    assert stats.draft_n > 0


def test_each_round_feeds_only_what_is_new():
    target = toy_target(scale=1.0)
    prompt = [0, 1, 3]
    answer, _ = generate(target, None, prompt, SamplingParams(temperature=1.0, ignore_eos=True),
                         (0,), num_tokens=200)  # fmt: skip
    drafter = DraftModelDrafter(toy_draft(noise=2.0))
    session = new_session(drafter, prompt)
    run = follow(drafter, session, prompt + answer, 3, [4] * 400)
    assert run.fed[0] <= 3 + 3
    assert max(run.fed[1:]) <= 2 + 3
    assert session.failures == 0


def test_resynchronises_by_common_prefix():
    source = random.Random(3)
    model = toy_draft()
    drafter = DraftModelDrafter(model)
    session = new_session(drafter, [0])
    tokens = [0]
    for _ in range(150):
        if source.random() < 0.3:
            tokens = tokens[: source.randrange(1, len(tokens) + 1)]
        tokens = tokens + [source.randrange(10) for _ in range(source.randrange(4))]
        count = source.choice([4, 0, 4, 1, 2])
        fresh = new_session(drafter, [0])
        assert ask(drafter, session, tokens, count) == ask(drafter, fresh, tokens, count)
        if count:
            assert session.ids[: len(tokens)] == tokens
            assert session._state.tokens == session.ids[: session._state.length]
    assert session.failures == 0, session.failure


def test_sampled_drafts_keep_the_noise_position_after_a_step_back():
    drafter = DraftModelDrafter(toy_draft())
    noise = Noise(4, 0, [0])
    session = new_session(drafter, [0], SAMPLED, noise)
    for tokens in ([0, 3, 5], [0, 3, 5, 6, 5], [0, 3], [0, 7, 4, 4]):
        fresh = new_session(drafter, [0], SAMPLED, noise)
        assert ask(drafter, session, tokens, 5) == ask(drafter, fresh, tokens, 5)


def test_drafts_beyond_what_was_taken_cost_no_pass():
    model = toy_draft()
    drafter = DraftModelDrafter(model)
    session = new_session(drafter, [0, 1], SamplingParams(ignore_eos=True))
    first = ask(drafter, session, [0, 1], 5)
    fed = model.tokens_processed
    assert ask(drafter, session, [0, 1, first[0]], 3) == first[1:4]
    assert model.tokens_processed == fed


def test_a_shorter_window_slides_at_amortised_cost():
    drafter = DraftModelDrafter(toy_draft(max_length=24))
    prompt = [n % 10 for n in range(50)]
    answer = prompt + [n % 7 for n in range(150)]
    session = new_session(drafter, prompt)
    run = follow(drafter, session, answer, 50, [4] * 300)
    assert session.failures == 0, session.failure
    assert all(run.drafted)
    assert sum(run.fed) < 7 * 150
    small = DraftModelDrafter(toy_draft(max_length=3))
    session = new_session(small, prompt)
    follow(small, session, answer, 50, [8] * 50)
    assert session.failures == 0, session.failure


def test_the_end_is_proposed_as_it_is_and_nothing_after_it():
    def ends(tokens):
        row = [0.0] * TARGET.size
        row[11] = 9.0
        return row

    drafter = DraftModelDrafter(ToyModel(TARGET, ends))
    assert ask(drafter, new_session(drafter, [0]), [0, 1], 4) == [11]
    masked = new_session(drafter, [0], SamplingParams(ignore_eos=True))
    assert 11 not in ask(drafter, masked, [0, 1], 4)


def test_ids_that_differ_or_pad_are_never_drafted():
    words = [f"w{i} ".encode() for i in range(400)]
    target = Vocabulary.from_tokens([*words, b"\x01", None, None], eos_ids=[401])
    draft = Vocabulary.from_tokens([*words, b"\x02", None, None, None, None], eos_ids=[401])
    comparison = compare(target, draft)
    assert comparison.same

    def likes_odd_ids(tokens):
        row = [0.0] * draft.size
        row[400] = row[402] = row[403] = row[404] = 9.0  # differs, padding, beyond the target
        row[5] = 1.0
        return row

    drafter = DraftModelDrafter(ToyModel(draft, likes_odd_ids), comparison)
    for params in (GREEDY, SamplingParams(temperature=1.0)):
        session = new_session(drafter, [1], params, None if params.greedy else Noise(1, 0, [1]))
        ids = ask(drafter, session, [1, 400, 402, 2], 6)  # foreign ids in the context, too
        assert len(ids) == 6
        assert not {400, 402, 403, 404} & set(ids)
        assert session.failures == 0, session.failure


def test_sessions_share_each_pass():
    model = toy_draft()
    passes = []
    extend = model.extend
    model.extend = lambda batch: passes.append(len(batch)) or extend(batch)
    drafter = DraftModelDrafter(model)
    params = SamplingParams(ignore_eos=True)
    one, two, three = (new_session(drafter, [0], params) for _ in range(3))
    drafts = drafter.draft([(one, [0, 1], 4), (two, [0, 2, 3], 2), (three, [0], 0)])
    assert [len(draft.token_ids) for draft in drafts] == [4, 2, 0]
    assert passes == [2, 2, 1, 1]
    assert ask(drafter, new_session(drafter, [0], params), [0, 1], 4) == drafts[0].token_ids


def test_edges():
    drafter = DraftModelDrafter(toy_draft())
    session = new_session(drafter, [])
    assert ask(drafter, session, [], 4) == []
    assert session.failures == 0
    assert len(ask(drafter, session, [1], 1)) == 1
    session.close()
    session.close()


def test_failures_inside_a_session_are_no_candidates():
    drafter = DraftModelDrafter(ToyModel(TARGET, lambda tokens: [float("nan")] * TARGET.size))
    session = new_session(drafter, [0])
    for _ in range(5):
        assert ask(drafter, session, [0, 1], 3) == []
    assert session.failures == 3
