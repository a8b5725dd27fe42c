"""The parts of a Hugging Face tokenizer, and copies of it that match only what they should."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

Part: TypeAlias = dict[str, Any]
"""A component of a tokenizer (normalizer, pre-tokenizer, decoder) as its JSON has it."""


def state(component: Any) -> Part | None:
    """A component's JSON, without serialising the whole tokenizer."""
    if component is None:
        return None
    part: Part = json.loads(component.__getstate__())
    return part


def leaves_of(part: Part | None) -> list[Part]:
    """The members of a component, sequences resolved."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    members = next(v for k, v in part.items() if k != "type" and isinstance(v, list))
    return [leaf for member in members for leaf in leaves_of(member)]


def matching_tokenizers(
    backend: Tokenizer,
    added: Mapping[int, AddedToken],
    matched: set[int],
    parts: Mapping[str, Part | None],
) -> tuple[Tokenizer, Tokenizer]:
    """(for the start of a text, for its continuation): only the ids in `matched` are matched.

    They share the original's model and do without its post-processor, truncation and padding.
    """
    at_start = _matching_only(backend, added, matched)
    at_start.normalizer, at_start.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    bare = {name: _without_prefix(part) for name, part in parts.items()}
    if bare == parts:
        return at_start, at_start
    going_on = _matching_only(backend, added, matched)
    going_on.normalizer, going_on.pre_tokenizer = _components(bare)
    return at_start, going_on


def _matching_only(
    backend: Tokenizer, added: Mapping[int, AddedToken], matched: set[int]
) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer

    copy = Tokenizer(backend.model)
    # White space beside an added token stays text, so that decoding gives the source back.
    copy.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                normalized=token.normalized,
                special=i not in matched,
            )
            for i, token in sorted(added.items())
        ]
    )
    copy.encode_special_tokens = True
    if copy.get_added_tokens_decoder().keys() == added.keys():
        return copy
    # Added ids with holes between them cannot be added again one by one: copy the definition.
    definition = json.loads(backend.to_str())
    definition.update(post_processor=None, truncation=None, padding=None)
    for token in definition["added_tokens"]:
        token.update(special=token["id"] not in matched, lstrip=False, rstrip=False)
    copy = Tokenizer.from_str(json.dumps(definition))
    copy.encode_special_tokens = True
    return copy


def _components(parts: Mapping[str, Part | None]) -> tuple[Any, Any]:
    """(normalizer, pre-tokenizer) from their JSON."""
    from tokenizers import Tokenizer

    empty: Part = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    shell = Tokenizer.from_str(json.dumps(empty))
    return shell.normalizer, shell.pre_tokenizer


def _without_prefix(part: Part | None) -> Part | None:
    """The component without what puts a space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        key = next(k for k, v in part.items() if k != "type" and isinstance(v, list))
        members = [_without_prefix(member) for member in part[key]]
        return {**part, key: [member for member in members if member is not None]}
    changed = dict(part)
    if part["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    elif part["type"] == "ByteLevel" and "add_prefix_space" in part:
        changed["add_prefix_space"] = False
    return changed


def prefixes_everywhere(parts: Mapping[str, Part | None]) -> bool:
    """Whether text after a special token gets a dummy prefix too, not only the first text."""
    leaves = leaves_of(parts["normalizer"]) + leaves_of(parts["pre_tokenizer"])
    return any(
        leaf["type"] == "Prepend"
        or leaf.get("prepend_scheme") == "always"
        or (leaf["type"] == "ByteLevel" and leaf.get("add_prefix_space"))
        for leaf in leaves
    )
