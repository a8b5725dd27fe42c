"""Opening files with transformers, and saying in words what is wrong with them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anydraft.backends.torch_argmax import RowSource
from anydraft.errors import (
    AnydraftError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    VocabularyError,
)

log = logging.getLogger(__name__)

_RECURRENT = ("mamba", "rwkv", "recurrent", "linear", "ssm", "conv", "retention", "lstm")
"""Parts of the names of layers and modules that keep a state which cannot be cut back."""
_CAN_PREAD = hasattr(os, "preadv")
_OTHER_HEADS = (
    "ForMaskedLM",
    "Classification",
    "ForQuestionAnswering",
    "ForPreTraining",
    "Embedding",
)


@dataclass(frozen=True)
class Source:
    """Where a model is: a folder, or one GGUF file."""

    path: Path
    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        """What transformers wants to hear."""
        if self.path.is_file():
            return {
                "pretrained_model_name_or_path": str(self.path.parent),
                "gguf_file": self.path.name,
            }
        return {"pretrained_model_name_or_path": str(self.path), "local_files_only": True}


def locate(spec: str | Path) -> Source:
    """A folder, a .gguf file, a pulled name or a hub id -> files on this disk."""
    from anydraft.store import resolve

    return Source(resolve(spec), str(spec))


def read_config(source: Source, trust_remote_code: bool) -> Any:
    """The model's config.

    Raises:
        ModelFileError, UnsupportedModelError: in words.
    """
    from transformers import AutoConfig

    with _explained(source):
        return AutoConfig.from_pretrained(**source.arguments, trust_remote_code=trust_remote_code)


def refuse_unfit(config: Any, name: str) -> None:
    """Raises UnsupportedModelError for what is no causal LM, or cannot forget a token."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model ({config.model_type}); "
            "anydraft runs decoder-only (causal) language models"
        )
    architectures = getattr(config, "architectures", None) or []
    if architectures and all(any(h in a for h in _OTHER_HEADS) for a in architectures):
        raise UnsupportedModelError(
            f"{name} is a {architectures[0]}, not a causal language model: it does not predict "
            "the next token"
        )
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(
        getattr(text, "layers_block_type", None) or ()
    )
    recurrent = sorted(k for k in kinds if any(part in k for part in _RECURRENT))
    if recurrent or any(part in config.model_type for part in ("mamba", "rwkv", "jamba")):
        raise _recurrent(name, ", ".join(recurrent) or config.model_type)


def refuse_stateful(model: Any, name: str) -> None:
    """The same, asked of the model itself."""
    if getattr(model, "_is_stateful", False):
        raise _recurrent(name, type(model).__name__)


def _recurrent(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} has recurrent layers ({what}): rejected tokens cannot be taken out of their "
        "state, so drafts cannot be undone. anydraft runs attention-only models"
    )


def read_model(source: Source, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model in evaluation mode, on the CPU.

    Raises:
        ModelFileError: weights are missing, truncated or of other shapes.
        UnsupportedModelError: transformers has no causal LM of this kind.
    """
    from transformers import AutoModelForCausalLM

    with _explained(source), _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            **source.arguments,
            config=config if source.path.is_dir() else None,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    for what, keys in (
        ("lacks", info["missing_keys"]),
        ("has other shapes for", info["mismatched_keys"]),
    ):
        if keys:
            some = ", ".join(str(key) for key in sorted(keys, key=str)[:3])
            raise ModelFileError(f"{source.name}: the file {what} {len(keys)} weights ({some}, …)")
    return model.eval()


def read_tokenizer(source: Source, trust_remote_code: bool) -> Any:
    """The fast tokenizer.

    Raises:
        VocabularyError: there is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = source.path
    try:
        with _quiet():
            if path.is_dir() and (path / "tokenizer.json").is_file() and not trust_remote_code:
                # The file defines the tokenizer. transformers' own way of opening it parses it
                # several times, or rebuilds it: seconds, with a large vocabulary.
                return PreTrainedTokenizerFast(
                    tokenizer_file=str(path / "tokenizer.json"), **_tokenizer_settings(path)
                )
            return AutoTokenizer.from_pretrained(
                **source.arguments, trust_remote_code=trust_remote_code
            )
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise VocabularyError(
            f"{source.name} has no tokenizer that can be read: {_first_line(error)}"
        ) from error


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Special tokens and the chat template, from the files beside tokenizer.json."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one counts
        if (folder / name).is_file():
            found |= json.loads((folder / name).read_text(encoding="utf-8"))
    kept = {k: v for k, v in found.items() if k.endswith("_token") and not k.startswith("add_")}
    settings = {k: v["content"] if isinstance(v, dict) else v for k, v in kept.items()}
    template = found.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template is not None:
        settings["chat_template"] = template
    return {name: value for name, value in settings.items() if value is not None}


class FileRows:
    """Rows of a matrix in a safetensors file, read when asked for.

    Unlike a mapping it leaves nothing resident, however many rows are read over time.

    Args:
        file: where it lies.
        key: its name there.
        like: a tensor of its shape and dtype.
    """

    def __init__(self, file: Path, key: str, like: torch.Tensor) -> None:
        self._dtype, self._width = like.dtype, like.shape[1]
        self._row_bytes = like.shape[1] * like.element_size()
        self._file = open(file, "rb", buffering=0)  # closed with this object
        header = int.from_bytes(self._file.read(8), "little")
        start, _ = json.loads(self._file.read(header))[key]["data_offsets"]
        self._start = 8 + header + start

    def __getitem__(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """(n,) int64, or a slice of n rows in a row -> (n, width)."""
        if isinstance(ids, slice):
            first = ids.start or 0
            return self._read([(first, ids.stop - first)])
        return self._read([(token_id, 1) for token_id in ids.tolist()])

    def _read(self, runs: list[tuple[int, int]]) -> torch.Tensor:
        """Runs of (first row, number of rows), one after the other."""
        out = torch.empty((sum(count for _, count in runs), self._width), dtype=self._dtype)
        flat: Any = out.view(torch.uint8).numpy().reshape(-1)  # bfloat16 has no NumPy type
        view = memoryview(flat)
        done = 0
        for first, count in runs:
            at, left = self._start + first * self._row_bytes, count * self._row_bytes
            while left:  # one read moves at most 2 GiB
                read = os.preadv(self._file.fileno(), [view[done : done + left]], at)
                if read <= 0:
                    raise ModelFileError(f"{self._file.name} became shorter after it was opened")
                done, at, left = done + read, at + read, left - read
        return out


def mapped_embedding(source: Source, model: Any) -> tuple[torch.Tensor, RowSource] | None:
    """The input embedding as it lies in the model's safetensors file, mapped and not copied.

    A pass reads a few rows of it, so it need not be resident, whatever its dtype. The second is the
    same for single rows. None if the files have it under another name or not at all.
    """
    from safetensors import safe_open

    if not source.path.is_dir():
        return None
    key = next(
        (
            f"{name}.weight"
            for name, m in model.named_modules()
            if m is model.get_input_embeddings()
        ),
        "",
    )
    here: torch.Tensor = model.get_input_embeddings().weight
    try:
        for file in sorted(source.path.glob("*.safetensors")):
            with safe_open(str(file), framework="pt") as tensors:
                if key in tensors.keys():  # not a dict
                    mapped: torch.Tensor = tensors.get_tensor(key)
                    rows: RowSource = FileRows(file, key, mapped) if _CAN_PREAD else mapped
                    some = torch.arange(0, here.shape[0], max(1, here.shape[0] // 64))
                    if mapped.shape == here.shape and torch.equal(
                        rows[some].to(here), here.detach()[some]
                    ):
                        return mapped, rows
    except OSError as error:
        log.debug("%s: the embedding is not mapped: %s", source.name, error)
    return None


def eos_ids(model: Any) -> list[int]:
    """Ids that end a generation: the generation config's, else the config's; may be empty."""
    config = model.config.get_text_config()
    for owner in (getattr(model, "generation_config", None), config, model.config):
        value = getattr(owner, "eos_token_id", None)
        if value is not None:
            return [int(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    return []


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turns transformers' exceptions into ours."""
    try:
        yield
    except (AnydraftError, KeyboardInterrupt):
        raise
    except MemoryError as error:
        raise ModelFileError(f"{source.name}: not enough memory to load it") from error
    except Exception as error:
        text, line = str(error), _first_line(error)
        if "trust_remote_code" in text:
            raise UnsupportedModelError(
                f"{source.name} brings its own code; it runs only with trust_remote_code=True"
            ) from error
        if isinstance(error, json.JSONDecodeError) or "valid JSON" in text:
            raise ModelFileError(f"{source.name}: config.json is not valid JSON") from error
        known = (
            "Unrecognized",
            "model type",
            "not supported",
            "does not recognize",
            "Architecture",
        )
        if isinstance(error, ImportError) or any(part in text for part in known):
            raise UnsupportedModelError(
                f"{source.name} is of a kind that transformers cannot run as a causal language "
                f"model: {line}"
            ) from error
        if isinstance(error, FileNotFoundError) and not source.path.exists():
            raise ModelNotFoundError(f"{source.name}: {source.path} does not exist") from error
        raise ModelFileError(
            f"{source.name}: the model's files are broken, truncated or incomplete ({line})"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or advice from transformers: what matters becomes an error here."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
