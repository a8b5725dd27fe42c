"""What is asked for and what comes back: requests, finished answers, conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from anydraft.drafter import DraftSession
from anydraft.errors import RequestError
from anydraft.model import ModelState
from anydraft.noise import Noise
from anydraft.output import Chunk, TokenLogprob
from anydraft.policy import check_num_draft_tokens
from anydraft.sampling import Processor, SamplingParams
from anydraft.stats import Stats

Prompt: TypeAlias = "str | bytes | Sequence[int]"
Message: TypeAlias = Mapping[str, str]

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate. Command-line flag, JSON field and argument share each name.

    Args:
        prompt: text, bytes, or ids of the target. Exactly one of prompt and messages is given.
        messages: a chat, as dicts with "role" and "content"; goes through the model's own template.
        max_tokens: at most so many tokens; the context limit may end the answer sooner.
        temperature ... processors: see SamplingParams.
        seed: any integer; None draws one, which Generation.seed reports.
        n: how many independent answers.
        stop: strings that end the answer; neither they nor anything after them is returned.
        stop_token_ids: ids that end it, beside the vocabulary's own end tokens.
        logprobs: how many alternatives to report with each token's log-probability; None reports
            none.
        num_draft_tokens: "auto" chooses the draft and its length round by round, by what pays; a
            number is the most tokens drafted in every round; "off" or 0 is plain decoding; None
            leaves it to the engine.

    Raises:
        RequestError: a field outside its range.
    """

    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
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
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    num_draft_tokens: int | str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either a prompt or messages")
        _whole("max_tokens", self.max_tokens, 1, 10_000_000)
        _whole("n", self.n, 1, 1024)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, 1000)
        check_num_draft_tokens(self.num_draft_tokens)
        if self.seed is not None:
            Noise(self.seed, 0, ())
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop takes strings that are not empty, not {self.stop!r}")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """The fields that SamplingParams shares with this request."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingParams)})


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished answer.

    Attributes:
        text: what was said, without stop strings and end tokens.
        token_ids: the same in target ids, the end token included if one was drawn.
        finish_reason: "stop" (an end token or stop string), "length", or "interrupted".
        from_draft: per token whether the draft foresaw it.
        logprobs: per token, if asked for.
        seed: the seed that gives exactly this answer again; None at temperature 0 without one.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    from_draft: list[bool]
    logprobs: list[TokenLogprob] | None
    seed: int | None
    stats: Stats
    prompt_index: int = 0
    choice: int = 0


@dataclass(slots=True, eq=False)
class Conversation:
    """The KV of a chat, kept from one request to the next: what both share is not processed again.

    Pass it to `Engine.stream` or `Engine.generate` with each request; close it at the end.
    """

    state: ModelState | None = None
    session: DraftSession | None = None
    tokens: list[int] = field(default_factory=list)

    def close(self) -> None:
        for kept in (self.state, self.session):
            if kept is not None:
                kept.close()
        self.state = self.session = None
        self.tokens = []


def fold(chunks: Iterable[Chunk], seeds: Sequence[int | None]) -> list[Generation]:
    """The finished answers that a stream amounts to, in the order of their first chunks' jobs."""
    parts: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault((chunk.prompt_index, chunk.choice), []).append(chunk)
    results: list[Generation] = []
    for (key, pieces), seed in zip(sorted(parts.items()), seeds, strict=True):
        last = pieces[-1]
        logprobs = [lp for piece in pieces for lp in piece.logprobs or ()]
        results.append(
            Generation(
                text="".join(piece.text for piece in pieces),
                token_ids=[i for piece in pieces for i in piece.token_ids],
                finish_reason=last.finish_reason or "interrupted",
                from_draft=[f for piece in pieces for f in piece.from_draft],
                logprobs=logprobs if last.logprobs is not None else None,
                seed=seed,
                stats=last.stats or Stats(),
                prompt_index=key[0],
                choice=key[1],
            )
        )
    return results


def is_batch(prompt: object) -> bool:
    """Whether it is a list of prompts, not one prompt as ids."""
    return isinstance(prompt, (list, tuple)) and not (prompt and isinstance(prompt[0], int))


def requests_of(prompt: Any, values: dict[str, Any]) -> list[GenerationRequest]:
    """One request per prompt, of a prompt or a list of them and the fields that all share.

    Raises:
        RequestError: an unknown field, one outside its range, or no prompt.
    """
    known = {f.name for f in fields(GenerationRequest)}
    for name in values:
        if name not in known:
            raise RequestError(f"unknown parameter {name!r}; known: {', '.join(sorted(known))}")
    if not is_batch(prompt):
        return [GenerationRequest(prompt=prompt, **values)]
    if not prompt:
        raise RequestError("the list of prompts is empty")
    first = GenerationRequest(prompt=prompt[0], **values)
    return [first, *(replace(first, prompt=p) for p in prompt[1:])]
