"""Every proposal law with every verification, through the real loop, by exact fractions.

The models' laws are replaced by tables of Fractions and the noise by one that walks every outcome
with its probability. Everything else is what generates: sessions, bridge, tables, verification,
loop. The law of the first tokens must be the target's, exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydraft.backends.toy import ToyModel
from anydraft.decode import DecodeSequence, decode
from anydraft.drafter import DraftContext
from anydraft.drafters import make_drafter
from anydraft.policy import FixedPolicy
from anydraft.sampling import Sampler, SamplingParams
from anydraft.vocabulary import Vocabulary
from toys import Branches

ONE = Fraction(1)


class ExactLaw:
    """Stands for sampling.Law."""

    def __init__(self, probs: Any) -> None:
        self.probs = probs

    def array(self, vocab_size: int) -> Any:
        return self.probs


class Tables:
    """Exact laws of any model by (vocabulary, last ids), with some impossible ids."""

    def __init__(self, seed: int, zeros: dict[str, int], context: int = 3) -> None:
        self.seed, self.zeros, self.context = seed, zeros, context

    def law(self, vocabulary: Vocabulary, tokens: Sequence[int], allowed: Any) -> Any:
        source = random.Random(f"{self.seed}/{vocabulary.name}/{tokens[-self.context :]}")
        weights = [source.randint(1, 5) for _ in range(vocabulary.size)]
        ids = [i for i in range(vocabulary.size) if allowed[i] and vocabulary.kinds[i] != 3]
        for i in source.sample(ids, min(len(ids) - 1, self.zeros.get(vocabulary.name, 0))):
            weights[i] = 0
        weights = [w if i in ids else 0 for i, w in enumerate(weights)]
        total = sum(weights)
        return np.array([Fraction(w, total) for w in weights], dtype=object)


class Walk:
    """Stands for Noise: every draw is a branch."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.used: set[tuple[str, int, int]] = set()

    def _once(self, *key: Any) -> None:
        assert key not in self.used, f"noise used twice: {key}"
        self.used.add(key)

    def flip(self, chance: Any, tag: str, start: int, step: int) -> bool:
        self._once(tag, start, step)
        return bool(self.choose([ONE - chance, chance]))

    def pick(self, probs: Any, tag: str, start: int, step: int) -> int:
        self._once(tag, start, step)
        return int(self.choose(probs))


def blank(vocabulary: Vocabulary) -> ToyModel:
    return ToyModel(vocabulary, lambda tokens: [0.0] * vocabulary.size, name=vocabulary.name)


class Rounds:
    """The loop over a pair of toy vocabularies under exact laws."""

    def __init__(self, target: Vocabulary, draft: Vocabulary, tables: Tables, method: str) -> None:
        self.tables = tables
        self.law, self.verification = method.split("+")
        self.target = blank(target)
        self.drafter = make_drafter(blank(draft), target)

    def run(self, choose: Any, num_draft_tokens: int, length: int) -> tuple[int, ...]:
        """At least one round; more until `length` ids are there."""
        vocabulary = self.target.vocabulary
        prompt = [0]
        noise: Any = Walk(choose)
        sequence = DecodeSequence(
            tokens=list(prompt),
            state=self.target.new_state(),
            sampler=Sampler(SamplingParams(temperature=1.0), vocabulary, 1),
            keys=np.empty(0, dtype=np.uint64),
            limit=100,
            policy=FixedPolicy(num_draft_tokens),
            stop=lambda token, _, row: "stop" if token in vocabulary.eos_ids else None,
            noise=noise,
            verification=self.verification,
        )
        sampling = SamplingParams(temperature=1.0)
        context = DraftContext(prompt, sampling, noise, law=self.law)
        sequence.session = session = self.drafter.new_session(context)
        for _ in decode(self.target, self.drafter, [sequence], lambda: 0.0):
            if len(sequence.tokens) > length:
                break
        assert session.failures == 0, session.failure  # type: ignore[attr-defined]
        return tuple(sequence.tokens[1:])


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sampler.law from a table: `exact(tables)`."""

    def install(tables: Tables) -> None:
        def law(self: Any, logits: Any, tokens: Sequence[int]) -> Any:
            allowed = [bool(x > -np.inf) for x in logits.tolist()]
            return ExactLaw(tables.law(self.vocabulary, list(tokens), allowed))

        monkeypatch.setattr(Sampler, "law", law)

    yield install


def completed(rounds: Rounds, num_draft_tokens: int, length: int, horizon: int) -> dict[Any, Any]:
    """Law of the first `horizon` ids, the target completing what the rounds left short."""
    target, tables = rounds.target.vocabulary, rounds.tables
    result: dict[Any, Any] = {}

    def add(ids: tuple[int, ...], weight: Any) -> None:
        if len(ids) >= horizon or (ids and ids[-1] in target.eos_ids):
            ids = ids[:horizon]
            result[ids] = result.get(ids, 0) + weight
            return
        law = tables.law(target, [0, *ids], [True] * target.size)
        for token_id, p in enumerate(law):
            if p:
                add((*ids, token_id), weight * p)

    for ids, weight in Branches(lambda choose: rounds.run(choose, num_draft_tokens, length)):
        add(ids, weight)
    return result


def alone(target: Vocabulary, tables: Tables, horizon: int) -> dict[Any, Any]:
    """The law of the target's first `horizon` ids."""
    result: dict[Any, Any] = {(): ONE}
    for _ in range(horizon):
        longer: dict[Any, Any] = {}
        for ids, weight in result.items():
            if ids and ids[-1] in target.eos_ids:
                longer[ids] = weight
                continue
            law = tables.law(target, [0, *ids], [True] * target.size)
            longer.update({(*ids, i): weight * p for i, p in enumerate(law) if p})
        result = longer
    return result


PLAIN_TARGET = Vocabulary.from_tokens([b"a", b"b", b"ab", None], name="target", eos_ids=[3])
PLAIN_DRAFT = Vocabulary.from_tokens([b"b", b"ab", b"a", b"ba", None], name="draft", eos_ids=[4])


@pytest.mark.parametrize(
    "method", ["tli+rejection", "tli+block", "ttp+rejection", "ttp+block", "union+rejection"]
)
@pytest.mark.parametrize("k", [1, 2])
def test_first(method: str, k: int, exact: Any) -> None:
    tables = Tables(1, {})
    exact(tables)
    rounds = Rounds(PLAIN_TARGET, PLAIN_DRAFT, tables, method)
    assert completed(rounds, k, 1, k + 1) == alone(PLAIN_TARGET, tables, k + 1)
