"""The runtime's own generation beside ours: transformers' `generate()` for targets of torch_hf."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydraft.errors import AnydraftError, RequestError

if TYPE_CHECKING:
    from anydraft.engine import Engine
    from anydraft.measure.bench_plan import PairSpec


@dataclass(frozen=True, slots=True)
class NativeRun:
    """One timed generation of another library's.

    Attributes:
        first_tokens, first_seconds: of its first round, which processes the prompt.
    """

    token_ids: list[int]
    seconds: float
    first_tokens: int
    first_seconds: float


class FirstRound:
    """A streamer for generate() that notes when the first new tokens come, and how many."""

    def __init__(self) -> None:
        self.tokens = 0
        self.at = 0.0
        self._prompt_seen = False

    def put(self, ids: Any) -> None:
        if self._prompt_seen and not self.tokens:
            self.tokens, self.at = ids.numel(), time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


class NativeGeneration:
    """transformers, with its own copies of the models, in the dtype that ours has.

    Greedy only. Ends where ours does: at an end token or max_tokens.
    """

    def __init__(self, model: Any, assistant: Any, tokenizers: tuple[Any, Any] | None) -> None:
        self._model, self._assistant, self._tokenizers = model, assistant, tokenizers

    @property
    def can_draft(self) -> bool:
        """Whether generate() can be given the draft, too."""
        return self._assistant is not None

    def run(self, prompt_ids: list[int], max_tokens: int, num_draft_tokens: int) -> NativeRun:
        """Generate; with `num_draft_tokens` above 0, with the draft as `assistant_model`."""
        import torch

        first = FirstRound()
        options = self._drafting(num_draft_tokens) if num_draft_tokens else {}
        started = time.perf_counter()
        with torch.inference_mode():
            prompt = torch.tensor([prompt_ids], device=self._model.device)
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=first,
                **options,
            )
        ids: list[int] = output[0, len(prompt_ids) :].tolist()
        seconds = time.perf_counter() - started
        return NativeRun(ids, seconds, first.tokens, first.at - started)

    def _drafting(self, num_draft_tokens: int) -> dict[str, Any]:
        config = self._assistant.generation_config
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        options: dict[str, Any] = {"assistant_model": self._assistant}
        if self._tokenizers is not None:
            options["tokenizer"], options["assistant_tokenizer"] = self._tokenizers
        return options

    def close(self) -> None:
        """Let go of the models."""
        self._model = self._assistant = self._tokenizers = None


def native_generation(
    pair: PairSpec, engine: Engine, with_draft: bool
) -> tuple[NativeGeneration | None, str]:
    """The target's runtime's own generation, or the reason why there is none."""
    if engine.target.runtime != "torch_hf":
        return None, f"anydraft drives no generation of {engine.target.runtime}'s own"
    if pair.target.endswith(".gguf"):
        return None, "transformers is compared on folders and hub ids, not on .gguf files"
    try:
        return _transformers(pair, engine, with_draft), ""
    except (AnydraftError, OSError, ValueError, ImportError) as error:
        return None, f"transformers cannot run it: {error}"


def _transformers(pair: PairSpec, engine: Engine, with_draft: bool) -> NativeGeneration:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from anydraft.backends import is_self_draft

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target: Any = engine.target

    def model(spec: str, dtype: Any) -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(
            _place(spec), dtype=dtype, attn_implementation="sdpa"
        )
        return loaded.to(target.device).eval()

    loaded = model(pair.target, target.dtype)
    loaded.generation_config.pad_token_id = 0
    eos = engine.vocabulary.eos_ids
    loaded.generation_config.eos_token_id = sorted(eos) or None
    if not with_draft or pair.draft in (None, "lookup"):
        return NativeGeneration(loaded, None, None)
    assert pair.draft is not None
    if pair.draft.endswith(".gguf") or is_self_draft(pair.draft):
        raise RequestError("its draft is a GGUF file")
    draft_model: Any = getattr(engine.drafter, "model", None)
    kind = str(getattr(draft_model, "dtype", "torch.float32")).removeprefix("torch.")
    assistant = model(pair.draft, kind)
    tokenizers = tuple(AutoTokenizer.from_pretrained(_place(s)) for s in (pair.target, pair.draft))
    same = tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    return NativeGeneration(loaded, assistant, None if same else (tokenizers[0], tokenizers[1]))


def _place(spec: str) -> str | Path:
    from anydraft import store

    return store.resolve(spec)
