"""Toy vocabularies, models, drafters and exact laws shared by the tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from anydraft.backends.toy import ToyModel, random_logits
from anydraft.drafter import Draft, DraftContext
from anydraft.vocabulary import Vocabulary

if TYPE_CHECKING:
    from anydraft.engine import Engine

TARGET_TOKENS = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b" ", b" a", b"\xc3", b"\xa9", b"a", None]
TARGET = Vocabulary.from_tokens(
    [*TARGET_TOKENS, None], name="toy target", eos_ids=[11], controls={11: "<end>"}
)  # id 10 duplicates id 0, id 11 ends, id 12 is padding


def toy_target(seed: int = 1, scale: float = 1.5, max_length: int | None = None) -> ToyModel:
    return ToyModel(TARGET, random_logits(TARGET.size, seed, scale), max_length)


class ScriptedDrafter:
    """Proposes what a function of (tokens, count) says."""

    name = "scripted"

    def __init__(self, propose: Any) -> None:
        self.propose = propose
        self.closed_sessions = 0

    def new_session(self, context: DraftContext) -> Any:
        owner = self

        class Session:
            tokens_processed = 0

            def close(self) -> None:
                owner.closed_sessions += 1

        return Session()

    def draft(self, batch: Sequence[Any]) -> list[Draft]:
        return [Draft(list(self.propose(list(tokens), count))) for _, tokens, count in batch]

    def close(self) -> None:
        pass


def random_drafter(size: int, seed: int = 0) -> ScriptedDrafter:
    """Random ids, some of them outside the vocabulary, padding or end tokens."""
    source = random.Random(seed)
    return ScriptedDrafter(
        lambda tokens, count: [source.randrange(size + 2) for _ in range(source.randint(0, count))]
    )


def oracle_drafter(engine: Engine, request: dict[str, Any], wrong_every: int = 0) -> Any:
    """Drafts what plain decoding says, with an error now and then: every accepted length occurs."""
    ids = engine.encode(_request(request))
    answer = ids + engine.plain().generate(**request).token_ids

    def propose(tokens: list[int], count: int) -> list[int]:
        ahead = answer[len(tokens) : len(tokens) + count]
        if wrong_every:
            ahead = [
                (i + 1) % engine.vocabulary.size if (len(tokens) + n) % wrong_every == 0 else i
                for n, i in enumerate(ahead)
            ]
        return ahead

    return ScriptedDrafter(propose)


def _request(values: dict[str, Any]) -> Any:
    from anydraft.engine import GenerationRequest

    return GenerationRequest(**values)


# ---- exact laws


def exact_law(size: int, source: random.Random, zeros: int = 0) -> Any:
    """A law of Fractions, with some impossible ids."""
    weights = [source.randint(1, 9) for _ in range(size)]
    for index in source.sample(range(size), zeros):
        weights[index] = 0
    total = sum(weights)
    return np.array([Fraction(w, total) for w in weights], dtype=object)


def exact_model(size: int, depth: int, seed: int, zeros: int = 0) -> dict[tuple[int, ...], Any]:
    """prefix -> law, for every prefix up to `depth` ids."""
    source = random.Random(seed)
    return {
        prefix: exact_law(size, source, zeros)
        for length in range(depth + 1)
        for prefix in itertools.product(range(size), repeat=length)
    }


class _Path:
    """One run: the choices of a script first, then the first possible outcome each time."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script
        self.weight = Fraction(1)
        self.taken: list[int] = []
        self.untaken: list[tuple[int, ...]] = []

    def choose(self, law: Any) -> int:
        options = [i for i, p in enumerate(law) if p > 0]
        if len(self.taken) < len(self.script):
            picked = self.script[len(self.taken)]
        else:
            picked = options[0]
            self.untaken.extend((*self.taken, other) for other in options[1:])
        self.weight *= law[picked]
        self.taken.append(picked)
        return picked


class Branches:
    """Runs a function under every sequence of outcomes, with the exact probability of each.

    The function calls `choose(law)`; each run follows one path. Iterating gives (result,
    probability).
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __iter__(self) -> Iterator[tuple[Any, Fraction]]:
        stack: list[tuple[int, ...]] = [()]
        while stack:
            path = _Path(stack.pop())
            result = self.function(path.choose)
            stack.extend(path.untaken)
            yield result, path.weight


def distribution(function: Any) -> dict[Any, Fraction]:
    """Outcome -> exact probability of a function of `choose`."""
    result: dict[Any, Fraction] = {}
    for outcome, weight in Branches(function):
        result[outcome] = result.get(outcome, Fraction(0)) + weight
    assert sum(result.values()) == 1
    return result
