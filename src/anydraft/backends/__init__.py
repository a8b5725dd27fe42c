"""Runtimes, found by name and imported only when asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydraft.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from anydraft.model import LanguageModel

RUNTIMES = {"torch_hf": "anydraft.backends.torch_hf"}
"""Name of a runtime -> the module whose `load(path_or_name, **options)` opens a model in it."""


def load_model(spec: str | Path, *, runtime: str | None = None, **options: Any) -> LanguageModel:
    """Open a model: a folder, a .gguf file, a pulled name or a hub id.

    Args:
        spec: what to open.
        runtime: one of RUNTIMES; None means torch_hf.
        options: the runtime's own, see its `load`.

    Raises:
        ModelError: the runtime is unknown or not installed, or the model cannot be opened.
        VocabularyError: the model has no tokenizer that can be read.
    """
    name = runtime or "torch_hf"
    if name not in RUNTIMES:
        raise UnsupportedModelError(f"unknown runtime {name!r}; known: {', '.join(RUNTIMES)}")
    try:
        backend = import_module(RUNTIMES[name])
    except ImportError as error:
        raise ModelError(f"the runtime {name} cannot be imported: {error}") from error
    model: LanguageModel = backend.load(spec, **options)
    _note_origin(model, spec, options)
    return model


def _note_origin(model: Any, spec: str | Path, options: dict[str, Any]) -> None:
    """Which files and options a model came from: measured costs are kept under them."""
    from anydraft.errors import AnydraftError
    from anydraft.store import resolve

    origin: dict[str, Any] = {"options": options}
    try:
        origin["path"] = str(resolve(spec))
    except AnydraftError:
        pass  # opened from elsewhere than the store; its costs are not kept
    model.origin = origin
