"""Models that every ModelState test runs on: toy tables, small random weights of each family."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anydraft.model import LanguageModel
from anydraft.vocabulary import Vocabulary
from tiny_gguf import gemma_gguf, llama_gguf
from torch_families import VOCAB, byte_tokenizer, stock_model


def torch_model(family: str, engine: str | None = None) -> LanguageModel:
    from anydraft.backends import torch_hf

    return torch_hf.from_objects(stock_model(family), byte_tokenizer(), name=family, engine=engine)


def toy_model() -> LanguageModel:
    from anydraft.backends.toy import ToyModel

    tokens: list[bytes | None] = [bytes([i]) for i in range(VOCAB)]
    vocabulary = Vocabulary.from_tokens(tokens)

    def logits(prefix: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash(prefix[-9:]) % (1 << 31))
        return torch.randn(VOCAB, generator=generator).tolist()

    return ToyModel(vocabulary, logits, max_length=640)


def llama_cpp_model(family: str, kind: str, **options: Any) -> LanguageModel:
    """A small GGUF file in llama.cpp. Sharing of prompts has its own tests; here it would hide."""
    pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")
    from anydraft.backends import llama_cpp

    make = gemma_gguf if family == "gemma" else llama_gguf
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / f"{family}.gguf", context=640, kind=kind, scale=0.2)
        return llama_cpp.load(path, threads=1, cache_prompt=False, **options)


def in_front_of_a_toy(name: str) -> LanguageModel:
    """The models of the laboratory that stand in front of others: they must not show."""
    from anydraft.measure.ledger import Ledger
    from anydraft.measure.replay import Replay

    return {"replay": Replay, "ledger": Ledger}[name](toy_model())


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "toy": toy_model,
    "replay": lambda: in_front_of_a_toy("replay"),
    "ledger": lambda: in_front_of_a_toy("ledger"),
    "llama": lambda: torch_model("llama"),
    "llama-modules": lambda: torch_model("llama", "modules"),
    "llama-stock": lambda: torch_model("llama", "stock"),
    "llama3_rope": lambda: torch_model("llama3_rope"),
    "mistral": lambda: torch_model("mistral"),
    "qwen2": lambda: torch_model("qwen2"),
    "qwen2-modules": lambda: torch_model("qwen2", "modules"),
    "qwen3": lambda: torch_model("qwen3"),
    "gemma2": lambda: torch_model("gemma2"),
    "gemma3": lambda: torch_model("gemma3"),
    "gemma3-modules": lambda: torch_model("gemma3", "modules"),
    "gemma3-stock": lambda: torch_model("gemma3", "stock"),
    "gpt_oss": lambda: torch_model("gpt_oss"),
    "gpt2": lambda: torch_model("gpt2"),
    "gpt_neox": lambda: torch_model("gpt_neox"),
    "bloom": lambda: torch_model("bloom"),
    "llama_cpp": lambda: llama_cpp_model("llama", "F32", type_k="f32", type_v="f32"),
    "llama_cpp-gemma": lambda: llama_cpp_model("gemma", "F32", type_k="f32", type_v="f32"),
    "llama_cpp-gemma-q8_0": lambda: llama_cpp_model("gemma", "Q8_0"),
    "llama_cpp-no-flash": lambda: llama_cpp_model("gemma", "Q8_0", flash_attn="off"),
    "llama_cpp-exact": lambda: llama_cpp_model("gemma", "Q8_0", exact=True),
    "llama_cpp-exact-llama": lambda: llama_cpp_model("llama", "Q5_0", exact=True),
    "llama_cpp-small-batch": lambda: llama_cpp_model("llama", "Q8_0", n_batch=37, n_ubatch=7),
}


ROUNDING = {
    "llama_cpp": 0.05,
    "llama_cpp-gemma": 0.05,
    "llama_cpp-exact": 0.0,
    "llama_cpp-exact-llama": 0.0,
    "llama_cpp-gemma-q8_0": 0.25,
    "llama_cpp-no-flash": 0.25,
    "llama_cpp-small-batch": 0.25,
}
"""Largest difference between logits of passes of different widths, where not 2e-4 (logits have a
standard deviation of 2; a token too many or too few changes them by 1 and more)."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QUICK = ("toy", "llama", "gemma3", "llama_cpp-exact")
"""What `make check` has time for; `make test` runs them all."""


@pytest.fixture(
    scope="package",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS],
)
def model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    built = MODELS[request.param]()
    if request.param in ROUNDING:
        built.rounding = ROUNDING[request.param]  # type: ignore[attr-defined]
    yield built
    built.close()
