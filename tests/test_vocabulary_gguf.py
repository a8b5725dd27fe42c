"""Vocabularies from GGUF metadata: the same tables as the Hugging Face tokenizer's, id by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")

from anydraft.errors import StateError
from anydraft.vocabulary import TokenKind, Vocabulary, compare
from anydraft.vocabulary_gguf import load_vocabulary
from anydraft.vocabulary_hf import from_pretrained
from tiny_gguf import byte_spellings, gemma_gguf, llama_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

TEXTS = [
    "Plain prose, with punctuation; and more.",
    "In 2024, 3.14159 and 1000000 and x2y3",
    "def f(x):\n\tif x:\n\t\treturn x ** 2  # square\n\n\n\n    return None\n",
    "a  b   c    d" + " " * 45 + "e",
    " leading and trailing ",
    "\n\n\n\t\t\t\r\n",
    "日本語の文章。中文字符 한국어",
    "ภาษาไทย العربية हिन्दी",
    "👩‍💻 🫩 🇩🇪 é é",
    "<table><tr><td>cell</td></tr></table><b>bold</b>",
    "typed <end_of_turn> and <|im_end|> and <0x41> and ▁ stay text",
]
BYTES = [
    b"",
    b"\xff\xfe",
    "half é".encode()[:-1],
    b"a\x00b",
    "ok ▁ \xff".encode("latin-1", "ignore"),
]


def vocab_file(path: Path, kind: str, rows: list[tuple[str, float, int]], **keys: Any) -> Path:
    """A GGUF file that holds a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list([row[0] for row in rows])
    writer.add_token_scores([row[1] for row in rows])
    writer.add_token_types([row[2] for row in rows])
    for name in ("context_length", "embedding_length", "block_count", "head_count"):
        getattr(writer, f"add_{name}")(32)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in keys.items():
        if name == "merges":
            writer.add_token_merges(value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spm_file(path: Path, **keys: Any) -> Path:
    rows = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces = ["▁t", "he", "▁the", "▁", *"abcdefghijklmnopqrstuvwxyz.,é"]
    rows += [(piece, -float(rank), NORMAL) for rank, piece in enumerate(pieces)]
    rows += [("<tool>", 0.0, USER_DEFINED), ("[PAD1]", 0.0, UNUSED)]
    return vocab_file(path, "llama", rows, **keys)


def round_trips(vocabulary: Vocabulary) -> None:
    for text in TEXTS:
        data = text.encode()
        ids, ends = vocabulary.encode_with_ends(data)
        assert vocabulary.decode(ids) == data, text
        assert ids == vocabulary.encode(data)
        assert ends == sorted(ends) and ends[-1] == len(data)
        assert vocabulary.control_ids.isdisjoint(ids)
    for data in BYTES:
        if all(bytes([byte]) in vocabulary.ids_by_bytes for byte in data):
            assert vocabulary.decode(vocabulary.encode(data)) == data
        else:  # SmolLM2 has no token for bytes that no UTF-8 text holds
            assert "\ufffd".encode() in vocabulary.decode(vocabulary.encode(data))


def same_tables(ours: Vocabulary, theirs: Vocabulary) -> None:
    assert ours.size == theirs.size
    pairs = zip(ours.token_bytes, theirs.token_bytes, strict=True)
    assert [(i, a, b) for i, (a, b) in enumerate(pairs) if a != b] == []
    assert np.flatnonzero(ours.kinds != theirs.kinds).tolist() == []
    for name in ("eos_ids", "bos_id", "prompt_prefix", "roles", "control_text", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.exact, ours.rewrites_text) == (theirs.exact, theirs.rewrites_text)
    same = ours.ids_by_bytes == theirs.ids_by_bytes  # no diff of 262,144 entries, please
    assert same
    assert ours.missing_bytes == theirs.missing_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "smollm"])
def test_real_tables_agree_with_hugging_face_on_every_id(name: str, request: Any) -> None:
    folder = request.getfixturevalue(f"{name}_path")
    [source] = folder.glob("*.gguf")
    ours, theirs = load_vocabulary(source), from_pretrained(folder)
    same_tables(ours, theirs)
    assert len(compare(ours, theirs).target_to_draft) == ours.size
    round_trips(ours)
    for data in BYTES:
        assert ours.encode(data) == theirs.encode(data)
    for text in TEXTS:
        assert ours.encode(text.encode()) == theirs.encode(text.encode()), text
        assert ours.encode_prompt(text) == theirs.encode_prompt(text)
    if ours.chat_template is not None:
        messages = [{"role": "user", "content": "Say <|im_end|> twice."}]
        assert ours.encode_chat(messages) == theirs.encode_chat(messages)


@pytest.mark.parametrize("make", [llama_gguf, gemma_gguf])
def test_small_tables(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "tiny.gguf")
    vocabulary = load_vocabulary(path)
    round_trips(vocabulary)
    if make is llama_gguf:
        assert vocabulary.token_bytes[:3] == [None, None, None]
        assert [vocabulary.token_bytes[3 + b] for b in range(256)] == [
            bytes([b]) for b in range(256)
        ]
        messages = [{"role": "user", "content": "hi <|im_end|>"}]
        ids = vocabulary.encode_chat(messages)
        assert (ids[0], ids[-1], ids.count(2)) == (1, 2, 1)
        assert vocabulary.decode(ids) == b"hi <|im_end|>"
        assert vocabulary.roles["end_of_turn"] == 2 and 2 in vocabulary.eos_ids
    else:
        assert vocabulary.kinds[4] == TokenKind.ADDED and vocabulary.token_bytes[5] == b"\n\n"
        assert vocabulary.prompt_prefix == [2]
        assert vocabulary.encode(b" the") == [vocabulary.ids_by_bytes[b" the"]]


def test_sentencepiece_with_a_dummy_prefix(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(spm_file(tmp_path / "spm.gguf", add_space_prefix=True))
    round_trips(vocabulary)
    the = vocabulary.ids_by_bytes[b" the"]
    assert vocabulary.encode(b"the", continuation=False) == [the]
    assert vocabulary.encode_with_ends(b"the", continuation=False) == ([the], [3])
    assert the not in vocabulary.encode(b"the")
    assert vocabulary.encode_prompt("the") == [1, the]
    assert vocabulary.prefix_after_control
    tool = vocabulary.ids_by_bytes[b"<tool>"]
    assert vocabulary.kinds[tool] == TokenKind.ADDED and tool in vocabulary.encode(b"a <tool> b")
    assert vocabulary.kinds[-1] == TokenKind.PADDING and vocabulary.token_bytes[-1] is None
    assert vocabulary.eos_ids == {2} and vocabulary.roles["unk"] == 0


@pytest.mark.parametrize(
    "pre", ["default", "gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "falcon", "tekken", "gpt-4o"]
)
def test_byte_level_bpe_with_each_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    rows = [("<|endoftext|>", 0.0, CONTROL)]
    rows += [(piece, 0.0, NORMAL) for piece in byte_spellings()]
    merges = ["t h", "th e", "Ġ the", "1 2"]
    rows += [(merge.replace(" ", ""), 0.0, NORMAL) for merge in merges]
    path = vocab_file(
        tmp_path / "bpe.gguf", "gpt2", rows, pre=pre, merges=merges, eos_token_id=0, bos_token_id=0
    )
    vocabulary = load_vocabulary(path)
    round_trips(vocabulary)
    assert vocabulary.exact and vocabulary.missing_bytes == frozenset()
    assert vocabulary.encode(b" the") == [vocabulary.ids_by_bytes[b" the"]]
    assert vocabulary.eos_ids == {0} and vocabulary.control_text == {0: "<|endoftext|>"}


def test_wordpiece_is_for_lookup_alone(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁world", "s", "▁,"]
    rows = [(w, 0.0, CONTROL if w.startswith("[") else NORMAL) for w in words]
    path = vocab_file(
        tmp_path / "wpm.gguf",
        "bert",
        rows,
        unknown_token_id=1,
        bos_token_id=2,
        seperator_token_id=3,
    )
    vocabulary = load_vocabulary(path)
    assert not vocabulary.exact and "WordPiece" in str(vocabulary.inexact_reason)
    ids = vocabulary.encode(b"Hello worlds")
    assert ids == [4, 5, 6] and vocabulary.decode(ids) == b" hello worlds"


def test_unigram(tmp_path: Path) -> None:
    rows = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    rows += [("▁the", -1.0, NORMAL), ("▁", -2.0, NORMAL), ("he", -2.5, NORMAL)]
    rows += [(letter, -3.0, NORMAL) for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary = load_vocabulary(vocab_file(tmp_path / "ugm.gguf", "t5", rows))
    assert not vocabulary.exact and "Unigram" in str(vocabulary.inexact_reason)
    assert vocabulary.rewrites_text is not None
    assert vocabulary.decode(vocabulary.encode(b"the cab")) in (b"the cab", b" the cab")


def test_a_closed_model_no_longer_encodes(tmp_path: Path) -> None:
    from anydraft.backends import llama_cpp

    model = llama_cpp.load(llama_gguf(tmp_path / "tiny.gguf"), threads=1)
    vocabulary = model.vocabulary
    assert vocabulary.encode(b"hello")
    model.close()
    model.close()
    with pytest.raises(StateError, match="was closed"):
        vocabulary.encode(b"hello")
    assert vocabulary.decode([3 + 65]) == b"A"  # the tables need no library
