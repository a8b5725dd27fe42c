"""The vocabulary of a model on disk: its tokenizer and configs, without its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anydraft.errors import VocabularyError
from anydraft.vocabulary import Vocabulary

_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "spiece.model",
)


def load_vocabulary(spec: str | Path) -> Vocabulary:
    """Vocabulary of a folder, .gguf file, pulled name or hub id.

    A GGUF file is read with llama.cpp, as when it runs there; without it, with transformers.

    Raises:
        ModelNotFoundError, ModelFileError, CacheError: as `anydraft.store.resolve`.
        VocabularyError: as `from_pretrained`.
    """
    from anydraft.store import resolve
    from anydraft.store_gguf import names_gguf, resolve_gguf

    if not names_gguf(spec):
        return from_pretrained(resolve(spec), name=str(spec))
    path = resolve_gguf(spec)
    if find_spec("llama_cpp") is None:
        return from_pretrained(path, name=str(spec))
    from anydraft import vocabulary_gguf

    return vocabulary_gguf.load_vocabulary(path, str(spec))


def from_pretrained(
    path: str | Path, tokenizer: Any = None, config: Any = None, *, name: str = ""
) -> Vocabulary:
    """Vocabulary of a model folder or .gguf file.

    Args:
        tokenizer: its tokenizer, if already loaded (`load_tokenizer`).
        config: its transformers config, if already loaded.
        name: for messages; the path's last part by default.

    Raises:
        VocabularyError: no tokenizer, one that cannot be read, or an encoder-only model.
    """
    path = Path(path)
    name = name or path.stem
    with _in_words(name, "config"):
        config = config if config is not None else _config(path)
    _check_decoder(config, name)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(path, name=name)
    with _in_words(name, "generation config"):
        eos_ids = _eos(path, config)
    return Vocabulary.from_hf(tokenizer, logits_width(config), name=name, eos_ids=eos_ids)


def load_tokenizer(path: str | Path, *, name: str = "") -> Any:
    """The transformers tokenizer of a folder or .gguf file, as its tokenizer.json defines it.

    Raises:
        VocabularyError: there is none, or it cannot be read.
    """
    path = Path(path)
    name = name or path.stem
    if path.is_dir() and not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise VocabularyError(
            f"{name} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is in {path}"
        )
    with _in_words(name, "tokenizer"):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if not path.is_dir():
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        settings = _plain_settings(path)
        if settings is not None:
            return PreTrainedTokenizerFast(
                tokenizer_file=str(path / "tokenizer.json"), name_or_path=str(path), **settings
            )
        # The model's own class builds the same tokenizer again from tokenizer.json's parts. It only
        # matters where special tokens are named nowhere but in code.
        loader = PreTrainedTokenizerFast if _names_specials(path) else AutoTokenizer
        return loader.from_pretrained(str(path), local_files_only=True)


def _plain_settings(path: Path) -> dict[str, Any] | None:
    """Arguments for a tokenizer whose settings are all plain values; None for any other.

    transformers' own loader parses tokenizer.json in Python as well: 1.5 s for Gemma's 262,144 ids.
    """
    file = path / "tokenizer_config.json"
    others = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
    if not _names_specials(path) or any((path / name).exists() for name in others):
        return None
    settings = json.loads(file.read_text("utf-8"))
    if any(isinstance(value, dict | list) for value in settings.values()):
        return None
    template = path / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text("utf-8")
    dropped = ("tokenizer_class", "backend", "is_local", "local_files_only", "name_or_path")
    return {key: value for key, value in settings.items() if key not in dropped}


def logits_width(config: Any) -> int:
    """Width of the logits by a transformers config; multimodal ones hold it one level down."""
    width = getattr(_text_config(config), "vocab_size", None)
    if not isinstance(width, int) or width <= 0:
        raise VocabularyError(
            "the model's config does not say how wide its logits are (vocab_size)"
        )
    return width


def _names_specials(path: Path) -> bool:
    if not (path / "tokenizer.json").is_file():
        return False
    if (path / "special_tokens_map.json").is_file():
        return True
    settings = path / "tokenizer_config.json"
    return settings.is_file() and "eos_token" in json.loads(settings.read_text("utf-8"))


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _config(path: Path) -> Any:
    if path.is_dir():
        # By hand where that is enough: transformers' configs import torch, which takes seconds.
        values = json.loads((path / "config.json").read_text("utf-8"))
        values = {**values, **(values.get("text_config") or {})}
        if "vocab_size" in values and values.get("architectures"):
            return SimpleNamespace(**values)
    from transformers import AutoConfig

    if path.is_dir():
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)


def _check_decoder(config: Any, name: str) -> None:
    kind = getattr(config, "model_type", "")
    architectures = getattr(config, "architectures", None) or []
    if architectures:
        # Multimodal decoders are ForConditionalGeneration too; encoder-decoders say so themselves.
        decodes = any(a.endswith(_DECODERS) for a in architectures)
    else:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        decodes = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not decodes or getattr(config, "is_encoder_decoder", False):
        what = ", ".join(architectures) or kind or "unknown"
        raise VocabularyError(
            f"{name} does not generate text token by token ({what}): "
            "anydraft needs a decoder, a causal language model"
        )


def _eos(path: Path, config: Any) -> list[int]:
    """Ids that end a generation: the generation config's, else the config's."""
    eos = None
    settings = path / "generation_config.json"
    if path.is_dir() and settings.is_file():
        # Read by hand: transformers' GenerationConfig imports torch, which takes seconds.
        eos = json.loads(settings.read_text("utf-8")).get("eos_token_id")
    if eos is None:
        eos = getattr(_text_config(config), "eos_token_id", None)
    if eos is None:
        return []
    return [int(i) for i in eos] if isinstance(eos, list | tuple) else [int(eos)]


@contextmanager
def _in_words(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except VocabularyError:
        raise
    except Exception as error:  # transformers raises nearly anything for a file it cannot read
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise VocabularyError(f"the {what} of {name} cannot be read: {reason}") from error
