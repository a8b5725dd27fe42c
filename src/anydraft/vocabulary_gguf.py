"""Reading a Vocabulary out of a GGUF file's metadata, with llama.cpp's own tokenizer to encode.

The bytes of every token come from the metadata (tokens, types, which kind of tokenizer); how text
is cut into them is the library's business, which knows all its pre-tokenizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anydraft.errors import VocabularyError
from anydraft.gguf_file import GgufHeader, read_model_header
from anydraft.vocabulary import Vocabulary
from anydraft.vocabulary_encoder import HfEncoder
from anydraft.vocabulary_tokenizer import FRAMES, Scheme, ids_of_bytes, roles_of, spell, tables

if TYPE_CHECKING:
    from anydraft.backends.llama_library import Handle

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
ARRAYS = (TOKENS, TYPES)
"""Arrays of the header that a vocabulary is read from."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_MARKER = "▁"
# `tokenizer.ggml.model` -> (byte-level alphabet, byte tokens, space marker, why inexact)
_KINDS: dict[str, tuple[bool, bool, str | None, str | None]] = {
    "llama": (False, True, _MARKER, None),
    "gpt2": (True, False, None, None),
    "gemma4": (False, True, _MARKER, None),
    "plamo2": (False, True, _MARKER, None),
    "t5": (False, True, _MARKER, "a Unigram tokenizer without byte fallback cannot spell"),
    "bert": (False, False, _MARKER, "a WordPiece tokenizer does not spell every byte"),
    "rwkv": (False, False, None, "an RWKV tokenizer's tokens are not read as bytes"),
}
_ESCAPING = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")  # BPE that marks spaces with "▁"


def load_vocabulary(path: Path, name: str = "") -> Vocabulary:
    """Vocabulary of a GGUF file, without its weights.

    Raises:
        ModelFileError: the file is not whole.
        VocabularyError: it has no tokenizer, or one that cannot be read.
        ModelError: llama-cpp-python is not installed.
    """
    from anydraft.backends.llama_library import vocabulary_only

    name = name or path.stem
    header = read_model_header(path, ARRAYS)
    check_tokenizer(header, name)
    handle = vocabulary_only(path, name, space_prefix=False)
    return read_vocabulary(header, handle, name)


def check_tokenizer(header: GgufHeader, name: str) -> None:
    """Refuse what llama.cpp would abort the process over.

    Raises:
        VocabularyError: says what is wrong with the tokenizer's metadata.
    """
    kind = header.meta.get("tokenizer.ggml.model")
    tokens, types = header.meta.get(TOKENS), header.meta.get(TYPES)
    if kind is None or kind in ("none", "no_vocab") or not isinstance(tokens, list) or not tokens:
        raise VocabularyError(
            f"{name} has no tokenizer in its metadata (tokenizer.ggml.*): what it generates could "
            "not be read; use a GGUF file that was converted with its tokenizer"
        )
    if not isinstance(tokens[0], bytes):
        raise VocabularyError(f"{name}: its tokens ({TOKENS}) are not strings")
    if types is not None and (not isinstance(types, list) or len(types) < len(tokens)):
        raise VocabularyError(f"{name} has {len(tokens):,} tokens, and types for fewer ({TYPES})")
    twice = [token for token, count in Counter(tokens).items() if count > 1 and token]
    if twice:
        raise VocabularyError(
            f"{name}: {len(twice)} tokens of its tokenizer are there twice, e.g. {twice[0]!r}; "
            "the file was converted wrongly"
        )
    if kind == "llama":
        there = set(tokens)
        gone = [b for b in range(256) if not {b"<0x%02X>" % b, bytes([b])} & there]
        if gone:
            raise VocabularyError(
                f"{name}: its SentencePiece tokenizer has no token for {len(gone)} of the 256 "
                "bytes, so there is text that it cannot encode"
            )
    for role in ("bos", "eos", "unknown", "padding", "seperator", "eot", "eom"):
        token_id = header.meta.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(token_id, int) and not 0 <= token_id < len(tokens):
            raise VocabularyError(
                f"{name}: tokenizer.ggml.{role}_token_id is {token_id}, and there are "
                f"{len(tokens):,} tokens"
            )


def read_vocabulary(header: GgufHeader, handle: Handle, name: str) -> Vocabulary:
    """Vocabulary from a checked header and a model whose tokenizer puts no space before a text."""
    library = _library(handle)
    kind = str(header.meta["tokenizer.ggml.model"])
    tokens = [token.decode("utf-8", "replace") for token in header.meta[TOKENS]]
    types = header.meta.get(TYPES) or [NORMAL] * len(tokens)
    scheme = _scheme(kind, str(header.meta.get("tokenizer.ggml.pre", "")), types)
    contents = {i: text for i, text in enumerate(tokens) if types[i] != UNUSED}
    added = {i for i in contents if types[i] == USER_DEFINED}
    controls = {i for i in contents if types[i] in (CONTROL, UNKNOWN)}
    controls |= {i for i in added if contents[i] in FRAMES}
    eos = _ends(library, handle, header, controls)
    controls |= eos
    literal = added - controls

    token_bytes, kinds = tables(
        spell(contents, added | controls, scheme), controls, literal, len(tokens)
    )
    known = _special_ids(library, handle)
    unknown = header.meta.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = next((i for i, t in enumerate(types) if t == UNKNOWN), None)
    settings = SimpleNamespace(
        **known, unk_token_id=unknown, chat_template=header.meta.get("tokenizer.chat_template")
    )
    prefixed = kind == "llama" and bool(header.meta.get("tokenizer.ggml.add_space_prefix", True))
    going_on = _LibraryTokenizer(handle)
    bos_id = known["bos_token_id"]
    adds_bos = bos_id is not None and bool(library.llama_vocab_get_add_bos(handle.vocab))
    return Vocabulary(
        name=name,
        token_bytes=token_bytes,
        kinds=kinds,
        encoder=HfEncoder(
            _LibraryTokenizer(handle, " ") if prefixed else going_on,  # type: ignore[arg-type]
            going_on,  # type: ignore[arg-type]
            spoken=[data or b"" for data in token_bytes],
            controls={i: contents[i] for i in sorted(controls)},
            byte_ids=ids_of_bytes(token_bytes, contents, scheme),
            marker=scheme.marker,
            byte_spellings=scheme.byte_fallback,
            keep=() if scheme.inexact_reason is None or unknown is None else (unknown,),
        ),
        bos_id=bos_id,
        prompt_prefix=[bos_id] if adds_bos and bos_id is not None else [],
        eos_ids=eos,
        roles=roles_of(settings, contents, controls, eos, unknown),
        control_text={i: contents[i] for i in sorted(controls)},
        chat_template=settings.chat_template,
        render_chat=_renderer(settings.chat_template, known, contents),
        control_strips=_strips(library, handle, controls),
        prefix_after_control=prefixed,
        inexact_reason=scheme.inexact_reason,
        rewrites_text=_rewriting(kind),
    )


def _library(handle: Handle) -> Any:
    from anydraft.backends.llama_library import library

    return library()


def _ends(library: Any, handle: Handle, header: GgufHeader, controls: set[int]) -> set[int]:
    """Ids that end a generation: the file's own, and controls that the library knows as such.

    The library also counts file separators of code models, and anything spelled like an end: in
    Gemma the tag of struck-through text, "</s>".
    """
    own = {header.meta.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")}
    vocab = handle.vocab
    separators = {
        getattr(library, f"llama_vocab_fim_{role}")(vocab) for role in ("pad", "rep", "sep")
    }
    known = {i for i in controls - separators if library.llama_vocab_is_eog(vocab, i)}
    return known | {i for i in own if isinstance(i, int)}


def _strips(library: Any, handle: Handle, controls: set[int]) -> dict[int, tuple[bool, bool]]:
    """Controls that swallow white space to their left or right."""
    left, right = library.LLAMA_TOKEN_ATTR_LSTRIP, library.LLAMA_TOKEN_ATTR_RSTRIP
    flags = {i: library.llama_vocab_get_attr(handle.vocab, i) for i in controls}
    return {i: (bool(f & left), bool(f & right)) for i, f in flags.items() if f & (left | right)}


def _scheme(kind: str, pre: str, types: Sequence[int]) -> Scheme:
    if kind == "gpt2" and pre in _ESCAPING:
        kind = "gemma4"
    byte_level, fallback, marker, reason = _KINDS.get(
        kind, (False, False, None, f"a tokenizer of kind {kind!r} is not known")
    )
    fallback = fallback and sum(t == BYTE for t in types) == 256
    if kind == "t5" and fallback:
        reason = None
    return Scheme(byte_level, fallback, marker, reason, None)


def _rewriting(kind: str) -> str | None:
    """What the tokenizer changes in text, in words."""
    return {"bert": "lower case, accents, white space", "t5": "NFKC, white space"}.get(kind)


def _special_ids(library: Any, handle: Handle) -> dict[str, int | None]:
    found = {
        f"{role}_token_id": getattr(library, f"llama_vocab_{role}")(handle.vocab)
        for role in ("bos", "eos", "pad")
    }
    return {name: None if token_id < 0 else int(token_id) for name, token_id in found.items()}


def _renderer(
    template: str | None, known: dict[str, int | None], contents: dict[int, str]
) -> Callable[[Sequence[dict[str, str]]], str] | None:
    if template is None:
        return None
    spelled = {
        name.removesuffix("_id"): contents.get(token_id, "") if token_id is not None else ""
        for name, token_id in known.items()
    }

    def render(messages: Sequence[dict[str, str]]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            add_generation_prompt=True,
            **spelled,
        )
        return str(rendered[0])

    return render


@dataclass(frozen=True)
class _Encoding:
    """What the encoder reads of a Hugging Face encoding."""

    ids: list[int]
    length: int

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Asked for only where a tokenizer rewrites text: all of it ends at the last id."""
        return [(0, self.length)] * len(self.ids)


class _LibraryTokenizer:
    """llama_tokenize with the face that HfEncoder knows."""

    def __init__(self, handle: Handle, prefix: str = "") -> None:
        self._handle = handle
        self._prefix = prefix
        self._tokenize = _library(handle).llama_tokenize
        self._token = _library(handle).llama_token

    def encode(self, text: str, add_special_tokens: bool = False) -> _Encoding:
        data = (self._prefix + text).encode()
        room = len(data) + 8  # a token spells at least one byte
        ids = (self._token * room)()
        count = self._tokenize(
            self._handle.vocab, data, len(data), ids, room, add_special_tokens, False
        )
        if count < 0:
            ids = (self._token * -count)()
            count = self._tokenize(
                self._handle.vocab, data, len(data), ids, -count, add_special_tokens, False
            )
        return _Encoding([i for i in ids[:count] if i >= 0], len(text))
