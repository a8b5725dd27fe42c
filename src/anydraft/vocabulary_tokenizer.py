"""Reading a Vocabulary out of a Hugging Face tokenizer's own definition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anydraft.errors import VocabularyError
from anydraft.vocabulary import TokenKind, Vocabulary
from anydraft.vocabulary_encoder import HfEncoder
from anydraft.vocabulary_parts import (
    Part,
    leaves_of,
    matching_tokenizers,
    prefixes_everywhere,
    state,
)

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

END_OF_TURN = (
    "<|im_end|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|endofturn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<turn|>",
    "<|return|>",
    "[/INST]",
)
START_OF_TURN = (
    "<|im_start|>",
    "<start_of_turn>",
    "<|start_header_id|>",
    "<|header_start|>",
    "<|start|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|turn>",
    "[INST]",
)
# Frame a conversation too; where a tokenizer does not flag them as special, a user could forge one.
FRAMES = frozenset(END_OF_TURN + START_OF_TURN) | {
    "<|end_header_id|>",
    "<|header_end|>",
    "<|eom_id|>",
    "<|eom|>",
    "<|channel|>",
    "<|message|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|endoftext|>",
}
_KEPT_NORMALIZERS = {"Prepend", "ByteLevel"}
_DROPPING = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}


@dataclass(frozen=True)
class Scheme:
    """How a tokenizer spells bytes."""

    byte_level: bool
    byte_fallback: bool
    marker: str | None
    inexact_reason: str | None
    rewrites_text: str | None
    part_prefix: str | None = None
    """WordPiece's "##": marks what goes on from the piece before; others begin a word."""
    word_suffix: str | None = None
    """BPE's "</w>": marks the end of a word."""


def read_tokenizer(
    tokenizer: Any, size: int, *, name: str = "", eos_ids: Iterable[int] | None = None
) -> Vocabulary:
    """See Vocabulary.from_hf."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyError(
            f"{name or 'this model'}: its tokenizer ({type(tokenizer).__name__}) has no fast form "
            "(tokenizer.json), so the bytes of its tokens cannot be read"
        )
    parts = {
        part: state(getattr(backend, part)) for part in ("normalizer", "pre_tokenizer", "decoder")
    }
    scheme = _scheme(backend, parts)
    added = backend.get_added_tokens_decoder()
    contents = {i: text for text, i in backend.get_vocab(with_added_tokens=True).items()}
    _check_width(contents, added, size, name)
    eos = {int(i) for i in eos_ids or ()}
    if tokenizer.eos_token_id is not None:
        eos.add(int(tokenizer.eos_token_id))
    eos = {i for i in eos if 0 <= i < size and i in contents}
    pieces = _piece_ids(backend, added, scheme)
    controls = _controls(tokenizer, backend, added, eos) - pieces
    literal = added.keys() - controls - pieces

    token_bytes, kinds = tables(
        spell(contents, added.keys() - pieces, scheme), controls, literal, size
    )
    control_text = {i: contents[i] for i in sorted(controls) if i in contents and i < size}
    beyond = {i: text for i, text in contents.items() if i >= size}
    matched = {i for i in literal if i < size}
    at_start, going_on = matching_tokenizers(backend, added, matched, parts)
    unknown = _unknown_id(backend)
    bos_id = tokenizer.bos_token_id
    return Vocabulary(
        name=name,
        token_bytes=token_bytes,
        kinds=kinds,
        encoder=HfEncoder(
            at_start,
            going_on,
            spoken=[data or b"" for data in token_bytes],
            controls={**control_text, **beyond},
            byte_ids=ids_of_bytes(token_bytes, contents, scheme),
            marker=scheme.marker,
            byte_spellings=type(backend.model).__name__ == "Unigram" and scheme.byte_fallback,
            keep=() if scheme.inexact_reason is None or unknown is None else (unknown,),
        ),
        bos_id=bos_id,
        prompt_prefix=_prompt_prefix(backend),
        eos_ids=eos,
        roles=roles_of(tokenizer, contents, controls, eos, unknown),
        control_text=control_text,
        chat_template=_template(tokenizer),
        render_chat=lambda messages: tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        ),
        control_strips={
            i: (token.lstrip, token.rstrip)
            for i, token in added.items()
            if i in controls and (token.lstrip or token.rstrip)
        },
        prefix_after_control=prefixes_everywhere(parts),
        inexact_reason=scheme.inexact_reason,
        rewrites_text=scheme.rewrites_text,
    )


def tables(
    spelled: Mapping[int, bytes], controls: Collection[int], literal: Collection[int], size: int
) -> tuple[list[bytes | None], npt.NDArray[np.uint8]]:
    """(bytes, kind) of every id up to `size`; what no token has is padding."""
    token_bytes: list[bytes | None] = [None] * size
    kinds = np.full(size, TokenKind.PADDING, np.uint8)
    for token_id, data in spelled.items():
        if token_id in controls and token_id < size:
            kinds[token_id] = TokenKind.CONTROL
        elif token_id < size:
            token_bytes[token_id] = data
            kinds[token_id] = TokenKind.ADDED if token_id in literal else TokenKind.ORDINARY
    return token_bytes, kinds


def _scheme(backend: Tokenizer, parts: Mapping[str, Part | None]) -> Scheme:
    model = type(backend.model).__name__
    flat = {name: leaves_of(part) for name, part in parts.items()}
    types = {leaf["type"] for leaves in flat.values() for leaf in leaves}
    byte_level = "ByteLevel" in types and model == "BPE"
    fallback = not byte_level and model in ("BPE", "Unigram") and _falls_back(backend)
    marker = None if byte_level else _marker(flat)
    reason = None
    if model not in ("BPE", "Unigram"):
        reason = f"a {model} tokenizer does not spell every byte"
    elif model == "BPE" and (
        backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix
    ):
        reason = "its BPE marks word parts instead of spelling spaces"
    elif not byte_level and not fallback:
        reason = f"a {model} tokenizer without byte fallback cannot spell every byte"
    rewrites = [
        leaf["type"]
        for leaf in flat["normalizer"]
        if leaf["type"] not in _KEPT_NORMALIZERS and not _is_space_marking(leaf, marker)
    ]
    rewrites += [
        leaf["type"]
        for leaf in flat["pre_tokenizer"]
        if leaf["type"] in _DROPPING or leaf.get("behavior") == "Removed"
    ]
    return Scheme(
        byte_level,
        fallback,
        marker,
        reason,
        ", ".join(rewrites) or None,
        part_prefix=getattr(backend.model, "continuing_subword_prefix", None) or None,
        word_suffix=getattr(backend.model, "end_of_word_suffix", None) or None,
    )


def _is_space_marking(leaf: Part, marker: str | None) -> bool:
    return leaf["type"] == "Replace" and (leaf["pattern"], leaf["content"]) == (
        {"String": " "},
        marker,
    )


def _falls_back(backend: Tokenizer) -> bool:
    """Whether a character that no piece spells becomes byte tokens (asked of the model itself)."""
    tokens = backend.model.tokenize("\U0010fffd")
    return bool(tokens) and all(token.value.startswith("<0x") for token in tokens)


def _marker(flat: Mapping[str, list[Part]]) -> str | None:
    """What stands for a space: a Metaspace's character, or what the decoder turns into one."""
    for leaf in (*flat["decoder"], *flat["pre_tokenizer"]):
        if leaf["type"] == "Metaspace":
            return str(leaf["replacement"])
        if leaf["type"] == "Replace" and leaf["content"] == " ":
            return leaf["pattern"].get("String")  # type: ignore[no-any-return]
    return None


def _check_width(
    contents: Mapping[int, str], added: Mapping[int, AddedToken], size: int, name: str
) -> None:
    beyond = [i for i in contents if i >= size and i not in added]
    if beyond:
        raise VocabularyError(
            f"{name or 'this model'}: its tokenizer has {max(contents) + 1:,} tokens but its "
            f"logits only {size:,}: the tokenizer belongs to another model"
        )


def _piece_ids(backend: Tokenizer, added: Mapping[int, AddedToken], scheme: Scheme) -> set[int]:
    """Added tokens that are really pieces of the model: runs of the space marker, byte tokens.

    Matched literally they would turn a typed "▁▁" into spaces; the model's merges make them anyway.
    """
    return {
        i
        for i, token in added.items()
        if not token.special
        and backend.model.token_to_id(token.content) == i
        and (
            (scheme.marker is not None and not token.content.strip(scheme.marker))
            or (scheme.byte_fallback and _byte_of(token.content) is not None)
        )
    }


def _controls(
    tokenizer: Any, backend: Tokenizer, added: Mapping[int, AddedToken], eos: set[int]
) -> set[int]:
    controls = {i for i, token in added.items() if token.special or token.content in FRAMES}
    controls.update(int(i) for i in tokenizer.all_special_ids)
    controls.update(eos)
    unknown = _unknown_id(backend)
    if unknown is not None:
        controls.add(unknown)
    return controls


def _unknown_id(backend: Tokenizer) -> int | None:
    """The id that the tokenizer's model gives to what it cannot spell."""
    text = getattr(backend.model, "unk_token", None)
    if text is not None:
        return _model_id(backend, text)
    if type(backend.model).__name__ == "Unigram":
        tokens = backend.model.tokenize("\U0010fffd")
        if len(tokens) == 1:
            return int(tokens[0].id)
        return _model_id(backend, "<unk>")
    return None


def _model_id(backend: Tokenizer, text: str) -> int | None:
    token_id = backend.model.token_to_id(text)
    return None if token_id is None else int(token_id)


def _byte_of(content: str) -> bytes | None:
    """The byte that "<0x41>" names."""
    if len(content) == 6 and content.startswith("<0x") and content.endswith(">"):
        try:
            return bytes([int(content[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_map() -> dict[int, str]:
    """GPT-2's byte-level alphabet: str.translate table from its characters to latin-1 bytes.

    Characters below 256 that it does not use go to U+FFFF, so that they cannot pass for bytes.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(printable)]
    table = dict.fromkeys(others, "\uffff")
    table.update({256 + n: chr(b) for n, b in enumerate(others)})
    return table


def spell(contents: Mapping[int, str], literal: Iterable[int], scheme: Scheme) -> dict[int, bytes]:
    """Bytes of every token. `literal`: ids spelled as they read."""
    literal = set(literal)
    spelled: dict[int, bytes] = {}
    table = _byte_map()
    for token_id, text in contents.items():
        if token_id in literal:
            spelled[token_id] = text.encode()
        elif scheme.byte_level:
            try:
                spelled[token_id] = text.translate(table).encode("latin-1")
            except UnicodeEncodeError:
                spelled[token_id] = text.encode()
        elif scheme.byte_fallback and (byte := _byte_of(text)) is not None:
            spelled[token_id] = byte
        else:
            spelled[token_id] = _plain_piece(text, scheme).encode()
    return spelled


def _plain_piece(text: str, scheme: Scheme) -> str:
    """What a piece reads as; only roughly where the scheme is inexact."""
    if scheme.part_prefix:
        beginning = not text.startswith(scheme.part_prefix)
        return f" {text}" if beginning else text[len(scheme.part_prefix) :]
    if scheme.word_suffix and text.endswith(scheme.word_suffix):
        return text[: -len(scheme.word_suffix)] + " "
    return text.replace(scheme.marker, " ") if scheme.marker else text


def ids_of_bytes(
    token_bytes: Sequence[bytes | None], contents: Mapping[int, str], scheme: Scheme
) -> dict[int, int]:
    """Byte value -> the id that spells just this byte: a byte token where there are such."""
    ids: dict[int, int] = {}
    if not (scheme.byte_level or scheme.byte_fallback):
        return ids
    for token_id, data in enumerate(token_bytes):
        if data is not None and len(data) == 1:
            if scheme.byte_fallback and _byte_of(contents[token_id]) is not None:
                ids[data[0]] = token_id
            else:
                ids.setdefault(data[0], token_id)
    return ids


def _prompt_prefix(backend: Tokenizer) -> list[int]:
    """What the post-processor puts before a text."""
    bare, full = (
        [i for i, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
        for encoding in (backend.encode("a", add_special_tokens=s) for s in (False, True))
    )
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return full[:at]
    return []


def roles_of(
    tokenizer: Any,
    contents: Mapping[int, str],
    controls: set[int],
    eos: set[int],
    unknown: int | None,
) -> dict[str, int]:
    roles = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad", "unk")}
    if roles["eos"] is None and eos:
        roles["eos"] = min(eos)
    if roles["unk"] is None:
        roles["unk"] = unknown
    by_text = {contents[i]: i for i in controls if i in contents}
    ends = [by_text[text] for text in END_OF_TURN if text in by_text]
    starts = [by_text[text] for text in START_OF_TURN if text in by_text]
    if ends:
        roles["end_of_turn"] = next((i for i in ends if i in eos), ends[0])
    elif _template(tokenizer) is not None:
        roles["end_of_turn"] = roles["eos"]
    if starts:
        roles["start_of_turn"] = starts[0]
    return {role: int(i) for role, i in roles.items() if i is not None}


def _template(tokenizer: Any) -> str | None:
    """The chat template; of several named ones, the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default") or next(iter(template.values()), None)
    return template
