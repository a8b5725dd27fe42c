"""Runtimes, found by name and imported only when asked for."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydraft.errors import ModelError, UnsupportedModelError
from anydraft.store_gguf import names_gguf

if TYPE_CHECKING:
    from anydraft.model import LanguageModel

RUNTIMES = {
    "torch_hf": "anydraft.backends.torch_hf",
    "llama_cpp": "anydraft.backends.llama_cpp",
}
"""Name of a runtime -> the module whose `load(path_or_name, **options)` opens a model in it."""


SELF = "self:"
"""What the name of a draft begins with that is a quantised copy of its target."""


def load_model(spec: str | Path, *, runtime: str | None = None, **options: Any) -> LanguageModel:
    """Open a model: a folder, a .gguf file, a pulled name or a hub id (see infer_runtime).

    Args:
        spec: what to open.
        runtime: one of RUNTIMES; None: see `infer_runtime`.
        options: the runtime's own, see its `load`.

    Raises:
        ModelError: the runtime is unknown or not installed, or the model cannot be opened.
        VocabularyError: the model has no tokenizer that can be read.
    """
    name = infer_runtime(spec, runtime)
    try:
        backend = import_module(RUNTIMES[name])
    except ImportError as error:
        raise ModelError(f"the runtime {name} cannot be imported: {error}") from error
    known = inspect.signature(backend.load).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for option in options:
            if option not in known:
                names = ", ".join(k for k in known if k not in ("spec", "role"))
                raise ModelError(f"unknown option {option!r} of {name}; known: {names}")
    model: LanguageModel = backend.load(spec, **options)
    note_origin(model, spec, options)
    return model


def infer_runtime(spec: str | Path, runtime: str | None = None) -> str:
    """The runtime that opens `spec`: the one asked for, else by what kind of model it names.

    GGUF files run in llama_cpp; folders, pulled names and hub ids of safetensors in torch_hf.

    Raises:
        UnsupportedModelError: there is no such runtime.
    """
    if runtime is not None and runtime not in RUNTIMES:
        raise UnsupportedModelError(f"unknown runtime {runtime!r}; known: {', '.join(RUNTIMES)}")
    if is_self_draft(spec):
        if runtime not in (None, "llama_cpp"):
            raise UnsupportedModelError(f"{spec} drafts in llama_cpp, not in {runtime}")
        return "llama_cpp"
    return runtime or ("llama_cpp" if names_gguf(spec) else "torch_hf")


def is_self_draft(spec: Any) -> bool:
    """Whether a draft's name means a quantised copy of its target ("self:q4_0")."""
    return isinstance(spec, str) and (spec == "self" or spec.startswith(SELF))


def note_origin(model: Any, spec: str | Path, options: dict[str, Any]) -> None:
    """Which files and options a model came from: measured costs are kept under them."""
    from anydraft.errors import AnydraftError
    from anydraft.store import resolve

    origin: dict[str, Any] = {"options": options}
    try:
        origin["path"] = str(resolve(spec))
    except AnydraftError:
        pass  # opened from elsewhere than the store; its costs are not kept
    model.origin = origin
