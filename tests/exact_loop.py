"""The real decode loop under exact laws: every outcome of every draw, with its probability.

The models' probabilities are tables of Fractions, and the noise walks all outcomes. Everything else
is what generates: sampler masks, sessions, bridge, piece tables, verification, loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

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
    """Exact laws of every model by its last ids.

    Args:
        zeros: vocabulary name -> how many ids are impossible at each position.
    """

    def __init__(self, seed: int, zeros: dict[str, int] | None = None, context: int = 3) -> None:
        self.seed, self.zeros, self.context = seed, zeros or {}, context
        self.known: dict[Any, Any] = {}

    def law(self, sampler: Sampler, logits: Any, tokens: Sequence[int]) -> ExactLaw:
        """Stands for Sampler.law: masks and penalties are the sampler's own."""
        row, masked = sampler._processed(logits, tokens)
        row = row.copy()
        row[masked] = -np.inf
        key = sampler.vocabulary.name, tuple(tokens[-self.context :]), row.tobytes()
        if key not in self.known:
            self.known[key] = self._draw(key, row)
        return ExactLaw(self.known[key])

    def _draw(self, key: Any, row: Any) -> Any:
        source = random.Random(f"{self.seed}/{key[:2]}")
        weights = [Fraction(source.randint(1, 5)) for _ in row]
        order = source.sample(range(len(row)), len(row))
        possible = [i for i in order if row[i] > -np.inf]
        impossible = set(possible[: min(len(possible) - 1, self.zeros.get(key[0], 0))])
        for i, score in enumerate(row):
            if score == -np.inf or i in impossible:
                weights[i] = Fraction(0)
            else:
                weights[i] *= Fraction(2) ** int(score)  # penalties in the tests are whole numbers
        total = sum(weights)
        return np.array([w / total for w in weights], dtype=object)


class Walk:
    """Stands for Noise: every draw is a branch, and none may share its noise with another."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.used: set[Any] = set()

    def flip(self, chance: Any, tag: str, start: int, step: int) -> bool:
        self._once(tag, start, step)
        return bool(self.choose([ONE - chance, chance]))

    def pick(self, probs: Any, tag: str, start: int, step: int) -> int:
        self._once(tag, start, step)
        return int(self.choose(probs))

    def _once(self, *key: Any) -> None:
        assert key not in self.used, f"the noise of {key} is used twice"
        self.used.add(key)


def blank(vocabulary: Vocabulary, max_length: int | None = None) -> ToyModel:
    """A model whose scores say nothing; the tables give its laws."""
    zeros = [0.0] * vocabulary.size
    return ToyModel(vocabulary, lambda tokens: zeros, max_length, name=vocabulary.name)


@dataclass
class Exact:
    """A pair under a method.

    Attributes:
        law, verification: the method's parts.
        prompt: target ids.
        limit: ids of an answer at most.
        sampling: masks and penalties.
        draft_model: instead of one that says nothing.
        new_drafter: makes a drafter of another kind.
        settings: the draft's.
        policy: count -> what decides K; by default always `count`.
    """

    target: Vocabulary
    draft: Vocabulary
    tables: Tables
    method: str
    prompt: tuple[int, ...] = (1,)
    limit: int = 100
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    draft_model: ToyModel | None = None
    new_drafter: Any = None
    settings: Any = None
    policy: Any = FixedPolicy
    drafted: int = 0
    accepted: int = 0
    errors: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.law, self.verification = self.method.split("+")
        self.model = blank(self.target)
        model = self.draft_model or blank(self.draft)
        self.drafter: Any = (
            self.new_drafter()
            if self.new_drafter
            else make_drafter(model, self.target, self.settings)
        )

    def run(self, choose: Any, count: int, length: int) -> tuple[int, ...]:
        """Rounds until the answer has `length` ids; at least one."""
        noise: Any = Walk(choose)
        sequence = DecodeSequence(
            tokens=list(self.prompt),
            state=self.model.new_state(),
            sampler=Sampler(self.sampling, self.target, len(self.prompt)),
            keys=np.empty(0, dtype=np.uint64),
            limit=len(self.prompt) + self.limit,
            policy=self.policy(count),
            stop=lambda token, _, row: "stop" if token in self.target.eos_ids else None,
            noise=noise,
            verification=self.verification,
        )
        context = DraftContext(self.prompt, self.sampling, noise, law=self.law)
        sequence.session = session = self.drafter.new_session(context)
        for _ in decode(self.model, self.drafter, [sequence], lambda: 0.0):
            if len(sequence.tokens) - len(self.prompt) >= length:
                break
        self.drafted += sequence.stats.draft_n
        self.accepted += sequence.stats.draft_n_accepted
        self.errors |= {getattr(session, "failure", None), sequence.stats.draft_error}
        session.close()
        return tuple(sequence.tokens[len(self.prompt) :])

    def target_law(self, ids: tuple[int, ...]) -> Any:
        import torch

        sampler = Sampler(self.sampling, self.target, len(self.prompt))
        return sampler.law(torch.zeros(self.target.size), [*self.prompt, *ids]).array(0)

    def alone(self, horizon: int) -> dict[Any, Any]:
        """The law of the target's first `horizon` ids."""
        return self._complete({(): ONE}, min(horizon, self.limit))

    def with_draft(self, count: int, length: int, horizon: int) -> dict[Any, Any]:
        """The same with drafts; what the rounds leave short the target completes."""
        result: dict[Any, Any] = {}
        for ids, weight in Branches(lambda choose: self.run(choose, count, length)):
            result[ids] = result.get(ids, 0) + weight
        return self._complete(result, min(horizon, self.limit))

    def _complete(self, given: dict[Any, Any], horizon: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        stack = list(given.items())
        while stack:
            ids, weight = stack.pop()
            if len(ids) >= horizon or (ids and ids[-1] in self.target.eos_ids):
                result[ids[:horizon]] = result.get(ids[:horizon], 0) + weight
            else:
                stack += [((*ids, i), weight * p) for i, p in enumerate(self.target_law(ids)) if p]
        return result


def check(
    exact: Exact,
    count: int,
    length: int = 1,
    horizon: int | None = None,
    failure: str | None = None,
) -> None:
    """The law with drafts is the target's, exactly, and drafts there were.

    Args:
        length: the rounds go on until so many ids are there.
        horizon: ids compared; by default what one round can give.
        failure: what the draft may fail of, and does.
    """
    horizon = count + 1 if horizon is None else horizon
    assert exact.with_draft(count, length, horizon) == exact.alone(horizon)
    assert exact.errors == {None, failure}
    assert exact.accepted > 0
    assert exact.accepted < exact.drafted
