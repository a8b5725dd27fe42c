"""llama-cpp-python's low-level API: imported when needed, its log lines in Python's logging."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from anydraft.errors import ModelError, ModelFileError, StateError, UnsupportedModelError

log = logging.getLogger("anydraft.llama_cpp")

INSTALL = "pip install 'anydraft[llama-cpp]'"
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
_ERROR, _GOES_ON = 4, 5
_LAST = threading.local()


@cache
def library() -> Any:
    """The module `llama_cpp`, its log lines routed to the logger "anydraft.llama_cpp".

    What it calls a warning is often chatter, so everything is taken one level lower.

    Raises:
        ModelError: not installed, too old, or not loadable.
    """
    try:
        import llama_cpp
    except ImportError as error:
        missing = getattr(error, "name", "") == "llama_cpp"
        reason = "is not installed" if missing else f"cannot be imported ({error})"
        raise ModelError(
            f"GGUF models run on llama-cpp-python, which {reason}: {INSTALL}"
        ) from error
    except Exception as error:  # the shared library beside it is missing or does not load
        raise ModelError(
            f"llama-cpp-python is installed but does not load ({error}); install it again: "
            f"{INSTALL} --force-reinstall --no-cache-dir"
        ) from error
    fields = {name for name, *_ in llama_cpp.llama_model_params._fields_}
    if not {"load_mode", "use_extra_bufts"} <= fields:
        raise ModelError(
            f"llama-cpp-python {llama_cpp.__version__} is too old: {INSTALL} --upgrade"
        )
    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _log_callback(llama_cpp: Any) -> Any:
    """Kept for the life of the process: the library holds on to it."""

    def receive(level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", "replace").rstrip()
        if level == _GOES_ON:  # goes on with the line before: progress dots
            return
        errors = getattr(_LAST, "errors", None)
        if level == _ERROR and errors is not None:
            errors.append(line)
            level = _ERROR - 1
        if line.strip(" ."):
            log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)

    return llama_cpp.llama_log_callback(receive)


@contextmanager
def collected_errors() -> Iterator[list[str]]:
    """What the library says at level error in this thread goes into the list, not to the log."""
    before = getattr(_LAST, "errors", None)
    _LAST.errors = []
    try:
        yield _LAST.errors
    finally:
        _LAST.errors = before


class Handle:
    """A llama_model, freed when nobody needs it, and never used after it was closed.

    Attributes:
        pointer: None once closed.
    """

    def __init__(self, pointer: Any, name: str) -> None:
        self.pointer = pointer
        self.name = name
        self._free = weakref.finalize(self, library().llama_model_free, pointer)

    @property
    def vocab(self) -> Any:
        """The llama_vocab.

        Raises:
            StateError: the model was closed.
        """
        if self.pointer is None:
            raise StateError(f"{self.name} was closed")
        return library().llama_model_get_vocab(self.pointer)

    def close(self) -> None:
        self.pointer = None
        self._free()


def load_model(path: Path, name: str, params: Any) -> Handle:
    """llama_model_load_from_file, its complaints as exceptions.

    Raises:
        UnsupportedModelError: an architecture or tokenizer that the library does not know.
        ModelFileError: anything else that it does not like.
    """
    with collected_errors() as errors:
        pointer = library().llama_model_load_from_file(str(path).encode(), params)
    if not pointer:
        raise _explained(name, errors)
    return Handle(pointer, name)


def vocabulary_only(path: Path, name: str, *, space_prefix: bool | None = None) -> Handle:
    """The vocabulary of a file, without weights.

    Args:
        space_prefix: overrides the file's word on whether a text begins with a dummy space.
    """
    api = library()
    params = api.llama_model_default_params()
    params.vocab_only = True
    overrides = None
    if space_prefix is not None:
        overrides = (api.llama_model_kv_override * 2)()  # the second, empty one ends the list
        overrides[0].tag = api.LLAMA_KV_OVERRIDE_TYPE_BOOL
        overrides[0].key = b"tokenizer.ggml.add_space_prefix"
        overrides[0].value.val_bool = space_prefix
        params.kv_overrides = overrides
    return load_model(path, name, params)


def _explained(name: str, errors: list[str]) -> ModelError:
    """The library's own last words, without the names of its functions."""
    said = [re.sub(r"^[a-z_:]+: ", "", line) for line in errors]
    said = [line for line in said if not line.startswith("failed to load model")] or said
    reason = "; ".join(dict.fromkeys(said)) or "no reason given"
    reason = reason.removeprefix("error loading model: ").strip()
    if "unknown model architecture" in reason:
        found = re.search(r"architecture: '([^']*)'", reason)
        kind = found[1] if found else "?"
        return UnsupportedModelError(
            f"{name}: this llama.cpp does not know the architecture {kind!r}; a newer "
            f"llama-cpp-python may: {INSTALL} --upgrade"
        )
    if "tokenizer" in reason and "unknown" in reason:
        return UnsupportedModelError(f"{name}: llama.cpp cannot read its tokenizer: {reason}")
    return ModelFileError(f"{name}: llama.cpp cannot load it: {reason}")
