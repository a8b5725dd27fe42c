"""anydraft: lossless speculative decoding with any draft for any target.

The names below load on first use, so `import anydraft` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anydraft.engine import Chunk, Engine, Generation, GenerationRequest, load
    from anydraft.errors import AnydraftError
    from anydraft.sampling import SamplingParams
    from anydraft.stats import Stats
    from anydraft.vocabulary import Vocabulary, compare

__version__ = "0.1.0"

_HOME = {
    "AnydraftError": "errors",
    "Chunk": "engine",
    "Engine": "engine",
    "Generation": "engine",
    "GenerationRequest": "engine",
    "SamplingParams": "sampling",
    "Stats": "stats",
    "Vocabulary": "vocabulary",
    "compare": "vocabulary",
    "load": "engine",
}

__all__ = [
    "AnydraftError",
    "Chunk",
    "Engine",
    "Generation",
    "GenerationRequest",
    "SamplingParams",
    "Stats",
    "Vocabulary",
    "compare",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"anydraft.{_HOME[name]}"), name)
    raise AttributeError(f"module 'anydraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
