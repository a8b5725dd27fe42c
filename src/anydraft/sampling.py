"""SamplingParams, and the one function that turns logits into the target's law at a position.

The order is fixed: penalties, logit bias, masks (padding, bad words, min-tokens, end tokens, custom
processors), temperature, top-k, top-p, min-p. Where others differ: llama.cpp puts temperature last
and counts the prompt in frequency penalties; OpenAI and vLLM, as here, count the output only;
transformers, as here, applies the repetition penalty to prompt and output.

Truncations are value thresholds: every id whose score reaches the threshold survives, so ties never
depend on an order of ids. Temperature 0 is a one-hot law on the lowest id of the maximum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from anydraft.errors import NumericsError, RequestError

if TYPE_CHECKING:
    from anydraft.vocabulary import Vocabulary

Processor: TypeAlias = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""A pure function of (all ids before the position, logits (vocab,)) giving new logits; it is also
called for positions that are rejected later."""

Scores: TypeAlias = npt.NDArray[np.float32]
PADDING = 3  # TokenKind.PADDING; the number spares an import cycle


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become its law. The defaults are greedy decoding.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k best ids (and ties); 0 keeps all.
        top_p: keep the best ids until their probability reaches p (after top-k); 1 keeps all.
        min_p: keep ids with at least this share of the best id's probability; 0 keeps all.
        repetition_penalty: ids of prompt and output: positive logits divided, negative multiplied
            (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
        frequency_penalty: subtracted once per occurrence in the output.
        presence_penalty: subtracted once for every id that occurs in the output.
        logit_bias: id -> added to its logit; -inf forbids the id.
        bad_words: id sequences that may not be completed.
        min_tokens: end tokens are forbidden until the output has so many tokens.
        ignore_eos: end tokens are forbidden always.
        processors: custom pure functions, after the masks.

    Raises:
        RequestError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        def number(name: str, low: float, high: float, *, above: bool = False) -> None:
            value = getattr(self, name)
            ok = _is_number(value) and (low < value if above else low <= value) and value <= high
            bounds = f"{'above' if above else 'at least'} {low:g}" + (
                f" and at most {high:g}" if math.isfinite(high) else ""
            )
            _require(ok, f"{name} must be a number {bounds}, not {value!r}")

        number("temperature", 0.0, 100.0)
        number("top_p", 0.0, 1.0, above=True)
        number("min_p", 0.0, 1.0)
        number("repetition_penalty", 0.0, 100.0, above=True)
        number("frequency_penalty", -100.0, 100.0)
        number("presence_penalty", -100.0, 100.0)
        for name in ("top_k", "min_tokens"):
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            _require(ok, f"{name} must be a whole number, 0 or more, not {value!r}")
        for token_id, bias in self.logit_bias.items():
            ok = isinstance(token_id, int) and isinstance(bias, (int, float)) and bias < math.inf
            _require(ok, f"logit_bias takes id -> number, not {token_id!r} -> {bias!r}")
        _require(all(self.bad_words), "bad_words holds an empty sequence of ids")

    @property
    def greedy(self) -> bool:
        """Whether every law is one-hot, so that no noise is needed."""
        return self.temperature == 0


class Law:
    """One position's law: unnormalised log-probabilities with maximum 0.

    Attributes:
        token_ids: (n,) int64 ascending: the ids that the scores belong to; None for all ids.
        scores: (n,) float32, log-probability minus that of the best id; -inf where impossible.
    """

    __slots__ = ("_log_mass", "scores", "token_ids")

    def __init__(self, token_ids: npt.NDArray[np.int64] | None, scores: Scores) -> None:
        self.token_ids = token_ids
        self.scores = scores
        self._log_mass: float | None = None

    @property
    def one_hot(self) -> bool:
        return len(self.scores) == 1

    @property
    def log_mass(self) -> float:
        """Natural logarithm of the sum of exp(scores)."""
        if self._log_mass is None:
            self._log_mass = math.log(float(np.exp(self.scores).sum(dtype=np.float64)))
        return self._log_mass

    def id_at(self, index: int) -> int:
        return index if self.token_ids is None else int(self.token_ids[index])

    def argmax(self) -> int:
        """The most probable id; the lowest one on a tie."""
        return self.id_at(int(self.scores.argmax()))

    def log_prob(self, token_id: int) -> float:
        """Natural log-probability of an id; -inf if the law cannot emit it."""
        index = token_id
        if self.token_ids is not None:
            index = int(np.searchsorted(self.token_ids, token_id))
            if index == len(self.token_ids) or self.token_ids[index] != token_id:
                return -math.inf
        return float(self.scores[index]) - self.log_mass

    def array(self, vocab_size: int) -> Any:
        """The law as (vocab_size,) float32 probabilities that sum to 1, as exactly as the scores
        themselves are known."""
        weights = np.exp(self.scores)
        weights /= weights.sum(dtype=np.float64)
        if self.token_ids is not None:
            sparse, weights = weights, np.zeros(vocab_size, dtype=np.float32)
            weights[self.token_ids] = sparse
        return weights

    def probs(self, vocab_size: int) -> torch.Tensor:
        """The law as (vocab_size,) float64 probabilities that sum to 1."""
        weights = np.exp(self.scores.astype(np.float64))
        weights /= weights.sum()
        if self.token_ids is not None:
            sparse, weights = weights, np.zeros(vocab_size)
            weights[self.token_ids] = sparse
        return torch.from_numpy(weights)


class Sampler:
    """Applies one sequence's SamplingParams at any of its positions. Keeps no state of its own.

    Args:
        params: what to apply.
        vocabulary: whose end and padding ids are meant.
        prompt_length: tokens before the output; penalties and min_tokens count from there.

    Raises:
        RequestError: an id in params lies outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary, prompt_length: int) -> None:
        self.params = params
        self.vocabulary = vocabulary
        self.prompt_length = prompt_length
        for token_id in (*params.logit_bias, *(i for word in params.bad_words for i in word)):
            _require(
                0 <= token_id < vocabulary.size,
                f"id {token_id} in logit_bias or bad_words is outside the vocabulary of "
                f"{vocabulary.size} ids",
            )
        self._banned = {i for i, bias in params.logit_bias.items() if bias == -math.inf}

    @cached_property
    def _padding(self) -> list[int]:
        return np.flatnonzero(np.asarray(self.vocabulary.kinds) == PADDING).tolist()

    def law(self, logits: torch.Tensor, tokens: Sequence[int]) -> Law:
        """The law of the next token.

        Args:
            logits: (vocab_size,) of any float type and device; not modified.
            tokens: every id before the position: prompt, output, and drafted ids of this round.

        Raises:
            NumericsError: NaN or +inf among the logits, or every id is forbidden.
        """
        params = self.params
        row, masked = self._processed(logits, tokens)
        best = int(row.argmax())
        if best in masked:
            row = row.copy()
            row[masked] = -np.inf
            best = int(row.argmax())
        top = float(row[best])
        if not math.isfinite(top):
            why = "every id is forbidden" if top == -math.inf else "the logits hold NaN or infinity"
            raise NumericsError(f"no token can be drawn at position {len(tokens)}: {why}")
        if params.temperature == 0:
            return Law(np.array([best], dtype=np.int64), np.zeros(1, dtype=np.float32))
        # Differences first: dividing large logits by a small temperature would lose the low bits.
        with np.errstate(over="ignore"):
            scores = row - np.float32(top)
            if params.temperature != 1.0:
                scores *= np.float32(1.0 / params.temperature)
        scores[masked] = -np.inf
        return _truncate(scores, params)

    def argmax_mask(self) -> list[int] | None:
        """The ids that can never come, if the law is the arg-max of the other logits as they are.

        None if it takes the logits to know the law.
        """
        params = self.params
        biased = any(bias != -math.inf for bias in params.logit_bias.values())
        penalised = params.repetition_penalty != 1.0 or (
            params.frequency_penalty or params.presence_penalty
        )
        if not params.greedy or biased or penalised or params.bad_words or params.processors:
            return None
        if params.min_tokens and not params.ignore_eos:
            return None
        ends = self.vocabulary.eos_ids if params.ignore_eos else ()
        return sorted({*self._banned, *ends, *self._padding})

    def forbids(self, token_id: int, tokens: Sequence[int]) -> bool:
        """Whether a mask that needs no logits forbids this id as the next one."""
        return token_id in self._banned or bool(
            self.vocabulary.kinds[token_id] == PADDING
            or (token_id in self.vocabulary.eos_ids and self._ends_forbidden(tokens))
            or (self.params.bad_words and token_id in self._completions(tokens))
        )

    def _ends_forbidden(self, tokens: Sequence[int]) -> bool:
        num_generated = len(tokens) - self.prompt_length
        return self.params.ignore_eos or num_generated < self.params.min_tokens

    def _completions(self, tokens: Sequence[int]) -> list[int]:
        """The ids that would complete a bad word."""
        return [
            word[-1]
            for word in self.params.bad_words
            if len(word) <= len(tokens) + 1
            and list(tokens[len(tokens) - len(word) + 1 :]) == list(word[:-1])
        ]

    def _processed(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[Scores, list[int]]:
        """The logits with penalties, bias and what processors do, and the ids that cannot come.

        The scores are the caller's own where nothing changes them: masking is left to `law`, whose
        result is new anyway.
        """
        params = self.params
        original = logits.detach().to("cpu", torch.float32).numpy()
        row = self._penalised(original, tokens)
        masked = list(self.vocabulary.eos_ids) if self._ends_forbidden(tokens) else []
        masked += self._completions(tokens)
        if params.logit_bias and row is original:
            row = original.copy()
        for token_id, bias in params.logit_bias.items():
            row[token_id] += bias
        if masked and params.processors:
            row = row.copy()
            row[masked] = -np.inf
        for processor in params.processors:
            changed: Any = processor(tokens, torch.from_numpy(row.copy()))
            if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
                raise RequestError(f"processor {processor!r} must return logits of the same shape")
            row = changed.detach().to("cpu", torch.float32).numpy()
        # A processor may lift what a mask forbade, but no padding.
        return row, [*([] if params.processors else masked), *self._padding]

    def _penalised(self, row: Scores, tokens: Sequence[int]) -> Scores:
        params = self.params
        if params.repetition_penalty != 1.0 and tokens:
            seen = np.unique(np.asarray(tokens, dtype=np.int64))
            row, values = row.copy(), row[seen]
            penalty = np.float32(params.repetition_penalty)
            row[seen] = np.where(values > 0, values / penalty, values * penalty)
        output = tokens[self.prompt_length :]
        if (params.frequency_penalty or params.presence_penalty) and output:
            counts = Counter(output)
            ids = np.fromiter(counts, dtype=np.int64)
            times = np.fromiter(counts.values(), dtype=np.float32)
            row = row.copy()
            row[ids] -= params.frequency_penalty * times + np.float32(params.presence_penalty)
        return row


def _truncate(scores: Scores, params: SamplingParams) -> Law:
    """Top-k, top-p and min-p as one score threshold (maximum of `scores` is 0)."""
    threshold = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scores):
        threshold = max(threshold, _kth_largest(scores, params.top_k))
    if params.top_p < 1.0:
        # top-p looks at what top-k left; min-p may only cut further, so their order is moot for it.
        after_top_k = _kth_largest(scores, params.top_k) if params.top_k else -math.inf
        threshold = max(threshold, _top_p_threshold(scores, params.top_p, after_top_k))
    if threshold == -math.inf:
        return Law(None, scores)
    kept = np.flatnonzero(scores >= np.float32(threshold))
    return Law(kept, scores[kept])


def _windows(scores: Scores) -> list[Scores]:
    """The scores of ever wider windows below the maximum: a law's bulk without sorting its tail."""
    return [scores[scores >= -width] for width in (4.0, 9.0)]


def _kth_largest(scores: Scores, k: int) -> float:
    if k >= len(scores):
        return -math.inf
    for window in _windows(scores):
        if len(window) >= k:
            return float(np.partition(window, len(window) - k)[len(window) - k])
    return float(np.partition(scores, len(scores) - k)[len(scores) - k])


def _top_p_threshold(scores: Scores, top_p: float, floor: float) -> float:
    """The score of the last id of the smallest set of best ids whose probability reaches top_p."""
    if floor > -math.inf:
        scores = scores[scores >= np.float32(floor)]
    total = float(np.exp(scores).sum(dtype=np.float64))
    for window in [*_windows(scores), scores]:
        ordered = np.sort(window)[::-1]
        mass = np.exp(ordered).cumsum(dtype=np.float64)
        if mass[-1] >= top_p * total:
            return float(ordered[int(np.searchsorted(mass, top_p * total))])
    return float(ordered[-1])  # rounding kept the whole mass a hair below top_p * total
