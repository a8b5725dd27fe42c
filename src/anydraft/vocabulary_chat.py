"""Conversations to ids through a model's own chat template, with user text kept text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from anydraft.errors import RequestError, VocabularyError

if TYPE_CHECKING:
    from anydraft.vocabulary import Vocabulary


def encode_chat(vocabulary: Vocabulary, messages: Sequence[dict[str, str]]) -> list[int]:
    """See Vocabulary.encode_chat."""
    name = vocabulary.name or "this model"
    if vocabulary.chat_template is None or vocabulary.render_chat is None:
        raise RequestError(f"{name} has no chat template: give a plain prompt instead of messages")
    check_messages(messages)
    spellings = vocabulary.control_pattern
    masked, originals = _mask(messages, spellings)
    rendered = _render(vocabulary, masked, name)

    ids: list[int] = []
    at = 0
    by_text = {text: i for i, text in sorted(vocabulary.control_text.items(), reverse=True)}
    swallow = False
    for match in [*spellings.finditer(rendered), None]:
        text = rendered[at : match.start() if match else len(rendered)]
        control = by_text[match.group()] if match else -1
        before, after = vocabulary.control_strips.get(control, (False, False))
        if swallow:
            text = text.lstrip()
        if before:
            text = text.rstrip()
        data = _unmask(text, originals).encode("utf-8", "surrogatepass")
        starts = not ids or vocabulary.prefix_after_control
        ids += vocabulary.encode(data, continuation=not starts)
        if match:
            ids.append(control)
            at, swallow = match.end(), after
    return ids


def check_messages(messages: Sequence[dict[str, str]]) -> None:
    """Refuse what is not a non-empty list of {"role": str, "content": str}.

    Raises:
        RequestError: says which message is wrong.
    """
    if not messages:
        raise RequestError("messages is empty: give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] is not an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"messages[{index}] needs a {key} that is text")


def plain_transcript(messages: Sequence[dict[str, str]]) -> str:
    """A conversation as plain text, for a draft model without a chat template."""
    lines = [f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages]
    return "".join(lines) + "Assistant:"


def _mask(
    messages: Sequence[dict[str, str]], spellings: re.Pattern[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Messages with every typed control token replaced by a private-use placeholder."""
    originals: list[str] = []

    def replace(match: re.Match[str]) -> str:
        originals.append(match.group())
        return f"\U0010fa0d{len(originals) - 1}\U0010fa0e"

    # A typed placeholder is masked too, or it would come back as another one's text.
    guarded = re.compile(f"[\U0010fa0d\U0010fa0e]|{spellings.pattern}")
    masked = [{**m, "content": guarded.sub(replace, m["content"])} for m in messages]
    return masked, originals


def _unmask(text: str, originals: Sequence[str]) -> str:
    if not originals:
        return text
    return re.sub(
        "\U0010fa0d([0-9]+)\U0010fa0e", lambda match: originals[int(match.group(1))], text
    )


def _render(vocabulary: Vocabulary, messages: Sequence[dict[str, str]], name: str) -> str:
    from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

    assert vocabulary.render_chat is not None
    try:
        return vocabulary.render_chat(messages)
    except (TemplateSyntaxError, UndefinedError) as error:
        raise VocabularyError(f"the chat template of {name} is broken: {error}") from error
    except TemplateError as error:  # raise_exception() in the template
        roles = ", ".join(dict.fromkeys(m["role"] for m in messages))
        raise RequestError(
            f"the chat template of {name} refuses this conversation (roles: {roles}): {error}"
        ) from error
    except Exception as error:
        raise VocabularyError(f"the chat template of {name} fails: {error}") from error
