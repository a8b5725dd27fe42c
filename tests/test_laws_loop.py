"""Every proposal law with every verification, through the real loop: error exactly 0."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydraft.backends.toy import ToyModel
from anydraft.drafter import Draft, DraftContext, DraftLaw, DraftSettings
from anydraft.sampling import Sampler, SamplingParams
from anydraft.vocabulary import Vocabulary
from exact_loop import Exact, Tables, check

# "ab" merges, id 3 doubles id 0, id 4 ends, id 5 is padding
TARGET = Vocabulary.from_tokens(
    [b"a", b"b", b"ab", b"a", None, None], name="target", eos_ids=[4], controls={4: "<e>"}
)
# splits ("ba", "aba"), a double of "a", one that the target cannot spell, an end inside a token
DRAFT = Vocabulary.from_tokens(
    [b"a", b"b", b"ba", b"aba", b"a", b"z", b"b<e>", None], name="draft", eos_ids=[7]
)
SHARED = Vocabulary.from_tokens(
    [b"a", b"b", b"ab", b"~~", None, None], name="draft", eos_ids=[4], controls={4: "<e>"}
)  # the target's vocabulary but for id 3
TINY = Vocabulary.from_tokens([b"a", b"b", None], name="draft", eos_ids=[2])

VERIFICATIONS = ("rejection", "block")
BRIDGED = ("union", "tli", "ttp")


@pytest.fixture(autouse=True)
def exact_sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Laws come from the tables of the pair that is at work."""
    current: list[Tables] = []
    monkeypatch.setattr(Sampler, "law", lambda self, *args: current[-1].law(self, *args))

    def pair(draft: Vocabulary, method: str, tables: Tables, **more: Any) -> Exact:
        current.append(tables)
        return Exact(TARGET, draft, tables, method, **more)

    return pair


def tables(seed: int, target_zeros: int = 0, draft_zeros: int = 0) -> Tables:
    return Tables(seed, {"target": target_zeros, "draft": draft_zeros})


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("law", BRIDGED)
@pytest.mark.parametrize("zeros", [(0, 0), (1, 2)])
@pytest.mark.parametrize("count", [1, 2])
def test_across_vocabularies(
    law: str, verification: str, zeros: Any, count: int, exact_sampler: Any
) -> None:
    seed = 7 * count + sum(zeros)
    check(exact_sampler(DRAFT, f"{law}+{verification}", tables(seed, *zeros)), count)


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize(
    ("count", "zeros"),
    [
        (1, (0, 0)),
        (1, (2, 1)),
        (2, (0, 0)),
        (2, (2, 1)),
        pytest.param(3, (0, 0), marks=pytest.mark.slow),
        (3, (2, 1)),
    ],
)
def test_one_vocabulary(verification: str, zeros: Any, count: int, exact_sampler: Any) -> None:
    check(exact_sampler(SHARED, f"same+{verification}", tables(count, *zeros)), count)


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("count", [1, 2])
def test_sequences_of_draft_tokens(verification: str, count: int, exact_sampler: Any) -> None:
    """slrs: "a" and "b" drawn together propose "ab"."""
    pair = exact_sampler(TINY, f"slrs+{verification}", tables(count, 1))
    table = pair.drafter.bridge.table("slrs", chat=False)
    assert (2,) in table.pieces
    check(pair, count)


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("law", [*BRIDGED, "slrs"])
@pytest.mark.parametrize("zeros", [pytest.param((1, 3), marks=pytest.mark.slow), (2, 2)])
def test_three_at_once(law: str, verification: str, zeros: Any, exact_sampler: Any) -> None:
    draft, draft_zeros = (TINY, 0) if law == "slrs" else (DRAFT, zeros[1])
    method = f"{law}+{verification}"
    check(exact_sampler(draft, method, tables(sum(zeros), zeros[0], draft_zeros)), 3)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_rounds_in_a_row_share_no_noise(verification: str, exact_sampler: Any) -> None:
    pair = exact_sampler(DRAFT, f"ttp+{verification}", tables(3, 2, 5))
    check(pair, 1, length=3, horizon=3)


MASKS: dict[str, SamplingParams] = {
    "no end yet": SamplingParams(temperature=1.0, min_tokens=2),
    "a bad word": SamplingParams(temperature=1.0, bad_words=((0, 1), (2,))),
    "a banned id": SamplingParams(temperature=1.0, logit_bias={0: -float("inf")}),
    "penalties": SamplingParams(temperature=1.0, frequency_penalty=1.0, presence_penalty=1.0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_masks_and_penalties(name: str, verification: str, exact_sampler: Any) -> None:
    """Each row is under its own prefix, earlier proposals of the round included."""
    pair = exact_sampler(
        DRAFT, f"ttp+{verification}", tables(5, 0, 4), sampling=MASKS[name], prompt=(1, 0)
    )
    check(pair, 2)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_the_limit_cuts_drafts_short(verification: str, exact_sampler: Any) -> None:
    """Near the end fewer are asked for, and pieces beyond that are not proposed."""
    pair = exact_sampler(DRAFT, f"ttp+{verification}", tables(8, 1, 4), limit=2)
    check(pair, 3)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_a_draft_that_breaks_on_what_it_drew(verification: str, exact_sampler: Any) -> None:
    """What was drawn before a failure stands, since the failure may hang on it."""

    def logits(tokens: tuple[int, ...]) -> list[float]:
        if tokens[-1] == 0 and len(tokens) > 1:
            raise RuntimeError("no more")
        return [0.0] * DRAFT.size

    model = ToyModel(DRAFT, logits, name="draft")
    pair = exact_sampler(DRAFT, f"ttp+{verification}", tables(20, 1, 5), draft_model=model)
    check(pair, 2, length=2, horizon=3, failure="RuntimeError: no more")


def test_a_short_window_of_the_draft(exact_sampler: Any) -> None:
    model = ToyModel(DRAFT, lambda tokens: [0.0] * DRAFT.size, 3, name="draft")
    pair = exact_sampler(
        DRAFT, "ttp+block", tables(10, 1, 5), draft_model=model, prompt=(1, 1, 0, 1, 1)
    )
    check(pair, 2)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_what_the_target_can_never_say_is_as_good_as_nothing(
    verification: str, exact_sampler: Any
) -> None:
    """A foreign drafter may propose padding: it cannot be processed, and its law stands."""
    law = DraftLaw(np.array([0, 2, 5]), np.array([Fraction(n, 6) for n in (1, 2, 3)]))

    class Session:
        tokens_processed = 0

        def __init__(self, context: DraftContext) -> None:
            self.noise: Any = context.noise

        def close(self) -> None:
            pass

    class Drafter:
        name = "padding"
        new_session = Session

        def draft(self, batch: Any) -> list[Draft]:
            return [
                Draft(
                    [
                        int(law.token_ids[session.noise.pick(law.probs, "draft", len(tokens), n)])
                        for n in range(count)
                    ],
                    [law] * count,
                )
                for session, tokens, count in batch
            ]

    pair = exact_sampler(DRAFT, f"same+{verification}", tables(4), new_drafter=Drafter)
    check(pair, 2)


STOPS = {
    "confidence": DraftSettings(min_confidence=0.4),
    "entropy": DraftSettings(max_entropy=1.5),
    "fewer tokens": DraftSettings(vocabulary=5),
    "shared tokens": DraftSettings(vocabulary="shared"),
}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("law", ["union", "ttp"])
def test_stops_and_smaller_vocabularies(name: str, law: str, exact_sampler: Any) -> None:
    """Whether to draw hangs on the draft's scores, which differ by what was drawn before."""

    def logits(tokens: tuple[int, ...]) -> list[float]:
        return [3.0 if tokens[-1] % 2 and i == 1 else 0.0 for i in range(DRAFT.size)]

    model = ToyModel(DRAFT, logits, name="draft")
    pair = exact_sampler(
        DRAFT, f"{law}+block", tables(2, 1, 2), draft_model=model, settings=STOPS[name]
    )
    check(pair, 2)
    assert bool(pair.drafter.bridge.left_out) == (STOPS[name].vocabulary is not None)
    free = exact_sampler(DRAFT, f"{law}+block", tables(2, 1, 2), draft_model=model)
    check(free, 2)
    assert pair.drafted != free.drafted
