"""Scripted models and a teacher-forced round loop for the drafters' tests."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydraft.backends.toy import ToyModel
from anydraft.decode import DecodeSequence, decode
from anydraft.drafter import DraftContext
from anydraft.noise import Noise, token_keys
from anydraft.policy import Policy
from anydraft.sampling import Sampler, SamplingParams
from anydraft.vocabulary import Vocabulary

TEXT = (
    "The steam engine turned heat into work; a boiler drives the piston, isn't it?\n\n"
    "def area(radius):\n    return 3.14159 * radius ** 2\n"
    "Les moteurs à vapeur ont changé l'été. Паровая машина. 蒸汽机改变了世界。 증기 기관 😀 👍🏽 "
    "x != y, 12345 67890\n\tindented, and then the wheel of the world went round."
)


def reader(
    vocabulary: Vocabulary, text: str, max_length: int | None = None, end: int | None = None
) -> ToyModel:
    """A model that knows a text by heart: it goes on from wherever the context's last bytes are.

    After the text, and where it is lost, it says `end` (by default its lowest end id).
    """
    known = text.encode()
    folded = unicodedata.normalize("NFKC", text).encode()
    last = min(vocabulary.eos_ids) if end is None else end

    def next_id(tokens: tuple[int, ...]) -> int:
        context = vocabulary.decode(tokens)[-16:]
        for source in (known, folded):
            for size in range(len(context), 0, -1):
                at = source.rfind(context[-size:])
                if at >= 0:
                    rest = vocabulary.encode(source[at + size :][:40])
                    return rest[0] if rest else last
        return last

    def logits(tokens: tuple[int, ...]) -> Any:
        row = np.full(vocabulary.size, -5.0)
        row[next_id(tokens)] = 5.0
        return row.tolist()

    return ToyModel(vocabulary, logits, max_length, name=f"reader {vocabulary.name}")


@dataclass
class Run:
    """What a teacher-forced run saw."""

    drafted: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)

    def rate(self) -> float:
        return sum(self.accepted) / max(1, sum(map(len, self.drafted)))


def follow(
    drafter: Any, session: Any, answer: Sequence[int], start: int, counts: Iterable[int]
) -> Run:
    """Rounds as the loop would run them if the target said exactly `answer`."""
    run, tokens = Run(), list(answer[:start])
    for count in counts:
        if len(tokens) >= len(answer):
            break
        before = session.tokens_processed
        ids = drafter.draft([(session, tokens, count)])[0].token_ids
        assert len(ids) <= count
        ahead = answer[len(tokens) :]
        right = 0
        while right < min(len(ids), len(ahead)) and ids[right] == ahead[right]:
            right += 1
        run.drafted.append(ids)
        run.accepted.append(right)
        run.fed.append(session.tokens_processed - before)
        tokens += ahead[: right + 1]
    return run


def generate(
    target: ToyModel,
    drafter: Any,
    prompt_ids: list[int],
    params: SamplingParams,
    counts: Sequence[int],
    num_tokens: int = 40,
    seed: int = 1,
) -> tuple[list[int], DecodeSequence]:
    """Through the real loop; `counts` are the numbers of draft tokens, round by round, in turn."""

    class Cycle(Policy):
        calls = 0

        def num_draft_tokens(self) -> int:
            self.calls += 1
            return counts[self.calls % len(counts)]

    noise = None if params.greedy else Noise(seed, 0, prompt_ids)
    sequence = DecodeSequence(
        tokens=list(prompt_ids),
        state=target.new_state(),
        sampler=Sampler(params, target.vocabulary, len(prompt_ids)),
        keys=token_keys(target.vocabulary),
        limit=len(prompt_ids) + num_tokens,
        policy=Cycle(),
        stop=lambda token, from_draft, row: "stop" if token in target.vocabulary.eos_ids else None,
        noise=noise,
    )
    if drafter is not None:
        sequence.session = drafter.new_session(DraftContext(prompt_ids, params, noise))
    for _ in decode(target, drafter, [sequence], lambda: 0.0):
        pass
    return sequence.tokens[len(prompt_ids) :], sequence
