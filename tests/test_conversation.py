"""A conversation is read once, by the target and by its draft."""

from __future__ import annotations

import pytest

import anydraft
from anydraft.backends.toy import ToyModel, random_logits
from anydraft.drafters.cross_vocabulary import CrossVocabularyDrafter
from anydraft.engine import Conversation
from cli_toys import toy
from tokenizers_for_tests import vocabulary


def foreign_draft() -> ToyModel:
    """A draft with a tokenizer of its own and a chat template."""
    made = vocabulary("byte_level")
    return ToyModel(made, random_logits(made.size, 1))


@pytest.mark.parametrize("kind", ["cross_vocabulary", "draft_model"])
def test_the_draft_reads_a_conversation_once_too(kind: str) -> None:
    target = toy(3, max_length=None, chat=True)
    draft = foreign_draft() if kind == "cross_vocabulary" else toy(2, max_length=None)
    engine = anydraft.load(target, draft, num_draft_tokens=4)
    assert isinstance(engine.drafter, CrossVocabularyDrafter) == (kind == "cross_vocabulary")
    conversation = Conversation()
    messages: list[dict[str, str]] = []
    fed: list[int] = []
    for _ in range(6):
        messages.append({"role": "user", "content": "a steam" * 5})
        before = draft.tokens_processed
        answer = engine.generate(messages=messages, conversation=conversation, max_tokens=12)
        fed.append(draft.tokens_processed - before)
        alone = engine.plain().generate(messages=messages, max_tokens=12)
        assert answer.token_ids == alone.token_ids
        messages.append({"role": "assistant", "content": answer.text})
    assert max(fed[3:]) < 1.5 * min(fed[1:3])


def test_raw_prompts_of_a_conversation_share_what_they_begin_with() -> None:
    target, draft = toy(3, max_length=None), foreign_draft()
    engine = anydraft.load(target, draft, num_draft_tokens=4)
    conversation = Conversation()
    text = "the steam engine " * 8
    engine.generate(text, conversation=conversation, max_tokens=8)
    before = draft.tokens_processed
    warm = engine.generate(text + "and the wheel", conversation=conversation, max_tokens=8)
    spent = draft.tokens_processed - before
    cold = engine.generate(text + "and the wheel", max_tokens=8)
    assert warm.token_ids == cold.token_ids
    assert spent < (draft.tokens_processed - before - spent) * 0.7
    conversation.close()
