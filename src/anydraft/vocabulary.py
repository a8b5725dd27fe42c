"""What a model's ids mean in bytes: the one thing that two vocabularies have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from anydraft.errors import RequestError, VocabularyError
from anydraft.vocabulary_compare import Comparison, compare

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Comparison", "Encoder", "TokenKind", "Vocabulary", "compare"]


class TokenKind(IntEnum):
    """What kind of thing an id is."""

    ORDINARY = 0
    """Bytes known; the tokenizer's model makes it."""
    ADDED = 1
    """Bytes known; matched literally in text (Gemma's newlines and tags, Qwen's `<think>`)."""
    CONTROL = 2
    """No bytes: bos, eos, end of turn, pad. Text never becomes one."""
    PADDING = 3
    """No token: the logits are wider than the tokenizer. Never drafted, mapped or emitted."""


class Encoder(Protocol):
    """Bytes to ids. Never yields a control id."""

    def encode(self, data: bytes, continuation: bool) -> list[int]:
        """Ids of `data`; with `continuation` false a dummy prefix may come first."""

    def encode_with_ends(self, data: bytes, continuation: bool) -> tuple[list[int], list[int]]:
        """The same ids, and for each the offset in `data` where it ends (never decreasing)."""


class Vocabulary:
    """Every id of a model with its bytes, kind and role; and how text becomes ids.

    Attributes:
        name: for messages.
        size: width of the logits; at least the tokenizer's size.
        token_bytes: per id its bytes; None for control and padding ids.
        kinds: per id its TokenKind, uint8.
        bos_id, eos_ids: eos_ids end a generation (may be empty).
        adds_bos: whether the tokenizer puts bos before a plain prompt.
        prompt_prefix: the ids it puts there, usually [bos_id] or [].
        roles: "bos", "eos", "pad", "unk", "end_of_turn", "start_of_turn" -> id, where known.
        control_text: literal spelling of each control id.
        chat_template: the model's own jinja template.
        exact: whether token_bytes are certain. If not, `inexact_reason` says why in words, and only
            drafters that stay in this vocabulary may be used.
        missing_bytes: byte values that no token sequence can spell. `encode` writes U+FFFD for a
            character that needs one, or leaves it out where that is missing too.
        rewrites_text: in words, what the tokenizer changes in text (NFKC, lower case); None when
            decode(encode(b)) == b for all bytes but the missing ones.
    """

    def __init__(
        self,
        *,
        token_bytes: Sequence[bytes | None],
        kinds: npt.NDArray[np.uint8],
        encoder: Encoder,
        name: str = "",
        bos_id: int | None = None,
        prompt_prefix: Sequence[int] = (),
        eos_ids: Iterable[int] = (),
        roles: Mapping[str, int] | None = None,
        control_text: Mapping[int, str] | None = None,
        chat_template: str | None = None,
        render_chat: Callable[[Sequence[dict[str, str]]], str] | None = None,
        control_strips: Mapping[int, tuple[bool, bool]] | None = None,
        prefix_after_control: bool = False,
        inexact_reason: str | None = None,
        rewrites_text: str | None = None,
    ) -> None:
        if len(token_bytes) != len(kinds):
            raise VocabularyError(f"{name}: {len(token_bytes)} tokens but {len(kinds)} kinds")
        self.name = name
        self.size = len(token_bytes)
        self.token_bytes: list[bytes | None] = list(token_bytes)
        self.kinds = kinds
        self.bos_id = bos_id
        self.prompt_prefix = list(prompt_prefix)
        self.adds_bos = bos_id is not None and bos_id in self.prompt_prefix
        self.eos_ids = frozenset(eos_ids)
        self.roles: dict[str, int] = dict(roles or {})
        self.control_text: dict[int, str] = dict(control_text or {})
        self.chat_template = chat_template
        self.exact = inexact_reason is None
        self.inexact_reason = inexact_reason
        self.rewrites_text = rewrites_text
        self.control_strips: dict[int, tuple[bool, bool]] = dict(control_strips or {})
        """Control ids that swallow white space to their left or right in a chat template."""
        self.prefix_after_control = prefix_after_control
        """Whether text right after a control token gets a dummy prefix again."""
        self.render_chat = render_chat
        self._encoder = encoder
        # Bytes to join when decoding: controls and padding say nothing.
        self._spoken: list[bytes] = [piece or b"" for piece in self.token_bytes]
        self.max_token_bytes = max(map(len, self._spoken), default=0)
        self.ids_by_bytes = self._canonical_ids()

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Vocabulary({self.name or 'unnamed'}, {self.size} ids)"

    def _canonical_ids(self) -> dict[bytes, int]:
        """For each byte string the id that `encode` gives, else the lowest ordinary id."""
        spoken = self._spoken
        # Filled backwards, added ids first, so that the lowest ordinary id is what stays.
        ids = {spoken[i]: i for i in np.flatnonzero(self.kinds == TokenKind.ADDED)[::-1].tolist()}
        ordinary = np.flatnonzero(self.kinds == TokenKind.ORDINARY)[::-1].tolist()
        ids.update({spoken[i]: i for i in ordinary})
        ids.pop(b"", None)
        for data in self.duplicates:
            encoded = self.encode(data)
            if len(encoded) == 1 and spoken[encoded[0]] == data:
                ids[data] = encoded[0]
        return ids

    @cached_property
    def duplicates(self) -> dict[bytes, list[int]]:
        """Byte strings that several ids spell, with those ids in ascending order."""
        ids = np.flatnonzero(self.kinds <= TokenKind.ADDED).tolist()
        first: dict[bytes, int] = {}
        several: dict[bytes, list[int]] = {}
        for token_id in ids:
            data = self._spoken[token_id]
            earlier = first.setdefault(data, token_id)
            if earlier != token_id and data:
                several.setdefault(data, [earlier]).append(token_id)
        return several

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Byte values that no single token spells."""
        return frozenset(b for b in range(256) if bytes([b]) not in self.ids_by_bytes)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """All ids of kind CONTROL."""
        return frozenset(np.flatnonzero(self.kinds == TokenKind.CONTROL).tolist())

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Finds spellings of control tokens in text, the longest first."""
        texts = sorted(filter(None, set(self.control_text.values())), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def encode(self, data: bytes, *, continuation: bool = True) -> list[int]:
        """Ids of `data`, never a control id, no bos.

        Args:
            data: any bytes; what is not UTF-8 becomes byte tokens.
            continuation: the text goes on from earlier text, so nothing is put before it. False: a
                text starts here, and gets the dummy prefix (a space) if the tokenizer adds one.
        """
        return self._encoder.encode(data, continuation) if data else []

    def encode_with_ends(
        self, data: bytes, *, continuation: bool = True
    ) -> tuple[list[int], list[int]]:
        """`encode`, and for each id the offset in `data` where it ends.

        Ends never decrease. Inside a character of rewritten text (NFKC) an id ends where the
        character starts, the last id of the character where it ends. The last end is len(data)
        unless the tokenizer dropped what follows.
        """
        return self._encoder.encode_with_ends(data, continuation) if data else ([], [])

    def encode_prompt(self, text: str | bytes) -> list[int]:
        """Ids of a plain prompt: bos if the tokenizer adds it, then the text from its start."""
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return [*self.prompt_prefix, *self.encode(data, continuation=False)]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the model's own template, ready for its answer.

        What looks like a control token inside a message stays text.

        Raises:
            RequestError: no chat template, messages that are not dicts of "role" and "content", or
                a conversation that the template refuses.
            VocabularyError: the template itself is broken.
        """
        from anydraft.vocabulary_chat import encode_chat

        return encode_chat(self, messages)

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of ids, joined; control and padding ids give none.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        spoken = self._spoken
        try:
            return b"".join([spoken[i] for i in token_ids])
        except IndexError:
            raise RequestError(f"{self.name}: a token id is outside 0..{self.size - 1}") from None

    @classmethod
    def from_hf(
        cls,
        tokenizer: Any,
        size: int,
        *,
        name: str = "",
        eos_ids: Iterable[int] | None = None,
    ) -> Vocabulary:
        """Read a Hugging Face fast tokenizer.

        Args:
            tokenizer: a transformers fast tokenizer. It is not changed.
            size: width of the model's logits.
            eos_ids: ids that end a generation (the generation config's), besides the tokenizer's.

        Raises:
            VocabularyError: no fast tokenizer, or one that does not fit the logits.
        """
        from anydraft.vocabulary_tokenizer import read_tokenizer

        return read_tokenizer(tokenizer, size, name=name, eos_ids=eos_ids)

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[bytes | None],
        *,
        name: str = "",
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        controls: Mapping[int, str] | None = None,
        encode: Callable[[bytes], list[int]] | None = None,
    ) -> Self:
        """A vocabulary given by its tokens, for toy models and tests.

        Args:
            tokens: bytes of each id; None for an id that is a control (listed in `controls`,
                `eos_ids` or `bos_id`) or else padding.
            bos_id: if given, prompts start with it.
            controls: spelling of control ids.
            encode: bytes to ids; without it, greedy longest match, and bytes that no token spells
                are left out.
        """
        controls, eos = dict(controls or {}), frozenset(eos_ids)
        special = {*controls, *eos} | ({bos_id} if bos_id is not None else set())
        kinds = np.zeros(len(tokens), np.uint8)
        for token_id, data in enumerate(tokens):
            if token_id in special:
                kinds[token_id] = TokenKind.CONTROL
                controls.setdefault(token_id, f"<{token_id}>")
            elif data is None:
                kinds[token_id] = TokenKind.PADDING
        pieces = [None if kinds[i] >= TokenKind.CONTROL else b for i, b in enumerate(tokens)]
        roles = {"eos": min(eos)} if eos else {}
        if bos_id is not None:
            roles["bos"] = bos_id
        return cls(
            token_bytes=pieces,
            kinds=kinds,
            encoder=_CalledEncoder(encode, pieces) if encode else _GreedyEncoder(pieces),
            name=name,
            bos_id=bos_id,
            prompt_prefix=() if bos_id is None else (bos_id,),
            eos_ids=eos,
            roles=roles,
            control_text=controls,
        )


class _GreedyEncoder:
    """Longest token first; bytes that begin no token are left out."""

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        self._ids: dict[bytes, int] = {}
        for token_id, data in enumerate(tokens):
            if data:
                self._ids.setdefault(data, token_id)
        self._longest = max(map(len, self._ids), default=0)

    def encode(self, data: bytes, continuation: bool) -> list[int]:
        return self.encode_with_ends(data, continuation)[0]

    def encode_with_ends(self, data: bytes, continuation: bool) -> tuple[list[int], list[int]]:
        ids, ends, at = [], [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token_id = self._ids.get(data[at:end])
                if token_id is not None:
                    ids.append(token_id)
                    ends.append(end)
                    at = end
                    break
            else:
                at += 1
        return ids, ends


class _CalledEncoder:
    """A function that the caller gave; its tokens must spell the source."""

    def __init__(
        self, function: Callable[[bytes], list[int]], tokens: Sequence[bytes | None]
    ) -> None:
        self._function = function
        self._tokens = tokens

    def encode(self, data: bytes, continuation: bool) -> list[int]:
        return self._function(data)

    def encode_with_ends(self, data: bytes, continuation: bool) -> tuple[list[int], list[int]]:
        ids = self._function(data)
        return ids, list(accumulate(len(self._tokens[i] or b"") for i in ids))
