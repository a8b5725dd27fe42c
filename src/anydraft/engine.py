"""GenerationRequest in, a stream of Chunks out. A non-streamed answer is the folded stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anydraft.adaptive import AdaptivePolicy
from anydraft.decode import DecodeSequence, decode
from anydraft.drafter import DraftContext, Drafter, DraftSettings
from anydraft.errors import PromptTooLongError, RequestError
from anydraft.generation import (
    Conversation,
    Generation,
    GenerationRequest,
    Prompt,
    fold,
    is_batch,
    requests_of,
)
from anydraft.learned import Experience
from anydraft.methods import AUTO, MATCH, Method, check_guarantee, check_offered, parse_method
from anydraft.model import LanguageModel
from anydraft.noise import Noise, token_keys
from anydraft.output import Chunk, Output, TokenLogprob
from anydraft.policy import OFF, FixedPolicy, Policy, check_num_draft_tokens
from anydraft.sampling import Sampler, SamplingParams
from anydraft.sources import drafters_of, first_experience

if TYPE_CHECKING:
    from anydraft.choice import Choice
    from anydraft.drafters.several import SeveralSession
    from anydraft.vocabulary import Vocabulary

__all__ = [
    "Chunk",
    "Conversation",
    "Engine",
    "Generation",
    "GenerationRequest",
    "TokenLogprob",
    "fold",
    "load",
]

_TYPICAL_DRAFT = 4
_NO_KEYS = np.empty(0, dtype=np.uint64)


@dataclass(slots=True, eq=False)
class _Job:
    sequence: DecodeSequence
    output: Output
    seed: int | None


class Engine:
    """A target, and a drafter or none.

    Args:
        target: the model whose words come out.
        drafter: proposes them; None is plain decoding. Beside another one, lookup is there too for
            "auto" to choose.
        num_draft_tokens: for requests that do not say it themselves; see GenerationRequest.
        method: how sampled answers are drafted and verified: "auto", "match", or a proposal law and
            a verification, e.g. "tli+rejection" (see methods.py). Greedy answers always go by
            match.
        guarantee: what "auto" may use: "seed" (only what gives the tokens of plain decoding with
            the same seed; the default) or "distribution" (also what gives tokens of the same law).
            Implied by a method that is named.

    Raises:
        RequestError: a method that does not exist, does not apply to this draft, or does not give
            the guarantee.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        num_draft_tokens: int | str = AUTO,
        *,
        method: str = AUTO,
        guarantee: str | None = None,
    ) -> None:
        check_num_draft_tokens(num_draft_tokens)
        check_guarantee(guarantee)
        self.target = target
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.guarantee = guarantee
        self._choices: dict[tuple[float, ...], Choice] = {}
        self.fixed_method = None if method == AUTO else parse_method(method)
        if self.fixed_method is not None:
            check_guarantee(guarantee, self.fixed_method)
            name = None if drafter is None else drafter.name
            check_offered(self.fixed_method, self.laws, name)
        self._drafters = None if drafter is None else drafters_of(drafter)
        self._experience: dict[bool, Experience] = {}

    @property
    def vocabulary(self) -> Vocabulary:
        return self.target.vocabulary

    def experience(self, *, sampled: bool = False) -> Experience:
        """What requests have taught about costs and acceptance so far; "auto" goes by it.

        Args:
            sampled: of requests at a temperature above 0; their passes and drafts are others.

        Raises:
            RequestError: there is no draft.
        """
        if self._drafters is None:
            raise RequestError("an engine without a draft has nothing to learn")
        if sampled not in self._experience:
            self._experience[sampled] = first_experience(
                self.target, self._drafters, sampled=sampled
            )
        return self._experience[sampled]

    @property
    def laws(self) -> dict[str, str]:
        """Proposal laws of the drafter: name -> "" if it applies, else why not."""
        return dict(getattr(self.drafter, "laws", {}))

    def method_for(self, sampling: SamplingParams) -> Method:
        """How answers with these parameters are drafted and verified."""
        if sampling.greedy or self.drafter is None:
            return MATCH
        if self.fixed_method is not None:
            return self.fixed_method
        return MATCH if self.guarantee != "distribution" else self.choice_for(sampling).method

    def choice_for(self, sampling: SamplingParams) -> Choice:
        """What "auto" does with these parameters, and why; measured when first asked.

        Under the guarantee "seed" it is match and nothing is measured.
        """
        from anydraft.choice import Choice, choose

        if sampling.greedy or self.drafter is None or self.guarantee != "distribution":
            return Choice(MATCH, "it alone gives the tokens of plain decoding with the same seed")
        key = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        if key not in self._choices:
            count = self.num_draft_tokens
            if isinstance(count, str):  # "auto" decides it round by round; methods differ little
                count = _TYPICAL_DRAFT
            self._choices[key] = choose(
                self.target, self.drafter, sampling, count, time.perf_counter
            )
        return self._choices[key]

    def plain(self) -> Engine:
        """The same target without a draft."""
        return Engine(self.target, None, 0)

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        conversation: Conversation | None = None,
        cancelled: Callable[[], bool] | None = None,
        **request: Any,
    ) -> Iterator[Chunk]:
        """Generate, yielding chunks as they are sure.

        Args:
            prompt: one prompt, or a list of them, which become one batch.
            conversation: KV to start from and to leave behind; one prompt, n = 1.
            cancelled: asked after every round; True ends all answers with "interrupted".
            request: the fields of GenerationRequest.

        Yields:
            Chunks. Each sequence's last one has a finish_reason and its stats.

        Raises:
            RequestError: before anything is generated.
        """
        jobs = self._jobs(requests_of(prompt, request), conversation)
        return self._run(jobs, conversation, cancelled)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        conversation: Conversation | None = None,
        **request: Any,
    ) -> Any:
        """Generate and wait.

        Returns:
            A Generation; a list of them for a list of prompts or n > 1 (prompt by prompt, choice by
            choice).
        """
        requests = requests_of(prompt, request)
        jobs = self._jobs(requests, conversation)
        results = fold(self._run(jobs, conversation), [job.seed for job in jobs])
        many = is_batch(prompt) or requests[0].n > 1
        return results if many else results[0]

    def close(self) -> None:
        """Free both models."""
        self.target.close()
        if self.drafter is not None:
            self.drafter.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, request: GenerationRequest) -> list[int]:
        """The prompt's ids as the target sees them.

        Raises:
            RequestError: an empty prompt without a start token, ids outside the vocabulary, or a
                prompt that leaves no room in the context.
        """
        vocabulary = self.vocabulary
        if request.messages is not None:
            ids = vocabulary.encode_chat([dict(message) for message in request.messages])
        elif isinstance(request.prompt, (str, bytes)):
            ids = vocabulary.encode_prompt(request.prompt)
        else:
            ids = [int(token_id) for token_id in request.prompt or ()]
            for token_id in ids:
                if not 0 <= token_id < vocabulary.size:
                    raise RequestError(f"prompt id {token_id} is outside the vocabulary")
        if not ids and vocabulary.bos_id is not None:
            ids = [vocabulary.bos_id]
        if not ids:
            raise RequestError(
                "the prompt is empty and this model has no start token; give it at least one token"
            )
        limit = self.target.max_length
        if limit is not None and len(ids) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens and the context of {self.target.name} holds "
                f"{limit}; shorten it by at least {len(ids) - limit + 1}"
            )
        return ids

    def _jobs(
        self, requests: list[GenerationRequest], conversation: Conversation | None
    ) -> list[_Job]:
        if conversation is not None and (len(requests) > 1 or requests[0].n > 1):
            raise RequestError("a conversation takes one prompt and n = 1")
        jobs: list[_Job] = []
        for index, request in enumerate(requests):
            ids = self.encode(request)
            sampling = request.sampling()
            seed = request.seed
            if seed is None and not sampling.greedy:
                seed = secrets.randbits(63)
            for choice in range(request.n):
                noise = None if sampling.greedy else Noise(seed or 0, choice, ids)
                job = self._job(request, sampling, ids, noise, seed, index, choice, conversation)
                jobs.append(job)
        return jobs

    def _job(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        ids: list[int],
        noise: Noise | None,
        seed: int | None,
        index: int,
        choice: int,
        conversation: Conversation | None,
    ) -> _Job:
        vocabulary = self.vocabulary
        output = Output(
            vocabulary,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            logprobs=request.logprobs,
            sampler=(sampler := Sampler(sampling, vocabulary, len(ids))),
            prompt_ids=ids,
            prompt_index=index,
            choice=choice,
        )
        limit = len(ids) + request.max_tokens
        if self.target.max_length is not None:
            limit = min(limit, self.target.max_length)
        sequence = DecodeSequence(
            tokens=list(ids),
            state=self.target.new_state(),
            sampler=sampler,
            keys=token_keys(vocabulary) if noise is not None else _NO_KEYS,
            limit=limit,
            policy=FixedPolicy(0),
            stop=output.push,
            noise=noise,
            argmax_mask=sampler.argmax_mask() if request.logprobs is None else None,
        )
        sequence.stats.prompt_tokens = len(ids)
        if self._drafters is not None:
            method = self.method_for(sampling)
            sequence.verification = method.verification
            messages = request.messages
            session = self._drafters.new_session(
                DraftContext(
                    prompt_ids=ids,
                    sampling=sampling,
                    noise=noise,
                    messages=None if messages is None else [dict(m) for m in messages],
                    previous=None if conversation is None else conversation.session,
                    law=method.law,
                )
            )
            sequence.session = session
            known = 0 if conversation is None else _num_shared(conversation.tokens, ids)
            sequence.policy = self._policy(request, session, known)
        return _Job(sequence, output, seed)

    def _policy(
        self, request: GenerationRequest, session: SeveralSession, already_read: int
    ) -> Policy:
        count = request.num_draft_tokens
        if count is None:
            count = self.num_draft_tokens
        if count == AUTO:
            known = self.experience(sampled=request.temperature > 0)
            return AdaptivePolicy(known, session, already_read)
        return FixedPolicy(0 if isinstance(count, str) else count)

    def _run(
        self,
        jobs: list[_Job],
        conversation: Conversation | None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Chunk]:
        sessions = [job.sequence.session for job in jobs]
        if conversation is not None:
            _resume(jobs[0].sequence, conversation)
        by_sequence = {id(job.sequence): job for job in jobs}
        clock = time.perf_counter
        rounds = decode(self.target, self._drafters, [job.sequence for job in jobs], clock)
        try:
            for took_part in rounds:
                stop_now = cancelled is not None and cancelled()
                for sequence in took_part:
                    if stop_now and sequence.finish_reason is None:
                        sequence.finish_reason = "interrupted"
                    chunk = by_sequence[id(sequence)].output.chunk(sequence)
                    if chunk is not None:
                        yield chunk
        finally:
            rounds.close()
            for job, session in zip(jobs, sessions, strict=True):
                if conversation is not None:
                    conversation.state = job.sequence.state
                    conversation.session = session
                    conversation.tokens = job.sequence.tokens
                    continue
                job.sequence.state.close()
                if session is not None:
                    session.close()


def _resume(sequence: DecodeSequence, conversation: Conversation) -> None:
    """Take over the KV that the conversation shares with the new prompt."""
    if conversation.state is None:
        return
    shared = _num_shared(conversation.tokens, sequence.tokens[:-1])
    sequence.state.close()
    sequence.state = conversation.state
    sequence.state.rollback(min(shared, sequence.state.length))
    if conversation.session is not None:
        conversation.session.close()


def _num_shared(old: Sequence[int], new: Sequence[int]) -> int:
    """How many leading ids are the same."""
    shared = 0
    for one, other in zip(old, new, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def load(
    target: Any,
    draft: Any = None,
    *,
    num_draft_tokens: int | str | None = None,
    draft_options: Mapping[str, Any] | None = None,
    draft_settings: DraftSettings | Mapping[str, Any] | None = None,
    method: str = AUTO,
    guarantee: str | None = None,
    **options: Any,
) -> Engine:
    """Load a target, and a draft if one is given, and connect them.

    Args:
        target: a folder, a GGUF file, a pulled name, a hub id, a LanguageModel, or a pair
            (transformers model, tokenizer).
        draft: the same kinds, or "lookup" (no model: repeats what the text already holds), or
            "self:q4_0" (a copy of the target with its weights in that type, see
            `backends.self_draft`), or None.
        num_draft_tokens: for requests that do not say it themselves, see GenerationRequest; None is
            "auto".
        draft_options: like options, for the draft. Without a dtype it runs in the quickest one that
            the machine has, since its rounding cannot reach the output.
        draft_settings: how a draft model drafts: the fields of DraftSettings.
        method, guarantee: see Engine.
        options: for the target's backend, e.g. dtype, device, threads.

    Raises:
        ModelError, VocabularyError, CacheError: in words that say what to do.
    """
    from anydraft.backends import is_self_draft, load_model
    from anydraft.backends.self_draft import kind_of, load_self_draft
    from anydraft.drafters import make_drafter

    check_guarantee(guarantee, None if method == AUTO else parse_method(method))  # before loading
    settings = _settings(draft_settings)
    if is_self_draft(draft):
        kind_of(draft)
    ways: dict[str, Any] = {"method": method, "guarantee": guarantee}
    model = target if isinstance(target, LanguageModel) else _load_one(load_model, target, options)
    if draft is None:
        return Engine(model, None, OFF, **ways)
    if draft == "lookup":
        source: Any = draft
    elif isinstance(draft, LanguageModel):
        source = draft
    elif is_self_draft(draft):
        source = load_self_draft(model, draft, **(draft_options or {}))
    else:
        source = _load_one(load_model, draft, {"role": "draft", **(draft_options or {})})
    drafter: Any = make_drafter(source, model.vocabulary, settings)
    # An object may be in use elsewhere, as the target even; what was loaded here is ours to cut.
    if source is not draft and hasattr(source, "keep_outputs") and drafter.left_out:
        left_out = set(drafter.left_out)
        source.keep_outputs([i for i in range(source.vocab_size) if i not in left_out])
    return Engine(model, drafter, AUTO if num_draft_tokens is None else num_draft_tokens, **ways)


def _settings(values: DraftSettings | Mapping[str, Any] | None) -> DraftSettings | None:
    if values is None or isinstance(values, DraftSettings):
        return values
    known = [f.name for f in fields(DraftSettings)]
    for name in values:
        if name not in known:
            raise RequestError(f"unknown draft setting {name!r}; known: {', '.join(known)}")
    return DraftSettings(**values)


def _load_one(load_model: Any, source: Any, options: Mapping[str, Any]) -> LanguageModel:
    if isinstance(source, (str, Path)):
        model: LanguageModel = load_model(source, **options)
        return model
    if isinstance(source, tuple) and len(source) == 2:
        from anydraft.backends.torch_hf import from_objects

        return from_objects(*source, **{k: v for k, v in options.items() if k != "role"})
    raise RequestError(f"cannot load a model from {type(source).__name__}: {source!r}")
