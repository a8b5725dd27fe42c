"""Converting GGUF: weights against transformers' loader, tokenizers against the metadata."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from anydraft import store_convert
from anydraft.errors import UnsupportedModelError
from anydraft.store_convert import BYTE, CONTROL, NORMAL, USER_DEFINED
from tiny_gguf import gemma_gguf, llama_gguf

TEXTS = [
    "Plain prose, with punctuation; and more.",
    "In 2024, 3.14159 and 1000000 and x2y3 and \u00bd \u2167 \u0665",
    "def f(x):\n\tif x:\n\t\treturn x ** 2  # square\n\n\n\n    return None\n",
    "a  b   c    d" + " " * 45 + "e",
    " leading and trailing ",
    "\n\n\n\t\t\t\r\n",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\u4e2d\u6587\u5b57\u7b26 \ud55c\uad6d\uc5b4",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f469\u200d\U0001f4bb \U0001fae9 \U0001f1e9\U0001f1ea e\u0301 \u00e9",
    "<table><tr><td>cell</td></tr></table><b>bold</b>",
    "",
]


def convert(source: Path, folder: Path) -> Path:
    folder.mkdir()
    store_convert.convert(source, folder, lambda done, of: None)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return convert(llama_gguf(folder / "tiny.gguf"), folder / "out")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    return convert(gemma_gguf(folder / "tiny.gguf"), folder / "out")


@pytest.fixture(scope="module", params=["gemma", "smollm"])
def real(request) -> tuple[str, Path, gguf.GGUFReader]:
    """(name, folder, its source): reading Gemma's takes ten seconds, so it is read once."""
    folder = request.getfixturevalue(f"{request.param}_path")
    (source,) = folder.glob("*.gguf")
    return request.param, folder, gguf.GGUFReader(source)


# --- weights and config ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_the_model_is_what_transformers_makes_of_the_file(architecture, request):
    import torch
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(architecture)
    ours, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder.parent, gguf_file="tiny.gguf", dtype=torch.float32
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    ids = torch.randint(10, ours.config.vocab_size, (2, 40))  # beyond the sliding window of 16
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.slow
def test_real_tensors_are_the_dequantised_ones(real):
    name, folder, source = real
    raw = {tensor.name: tensor for tensor in source.tensors}
    ours = safe_open(folder / "model.safetensors", "np")
    assert len(list(ours.keys())) == len(raw)

    def dequantised(key: str) -> np.ndarray:
        return gguf.dequantize(raw[key].data, raw[key].tensor_type)

    last = len([key for key in raw if key.endswith("attn_q.weight")]) - 1
    pairs = {"ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj", "ffn_up": "mlp.up_proj"}
    for layer in (0, last):
        for short, long in pairs.items():
            found = ours.get_tensor(f"model.layers.{layer}.{long}.weight")
            np.testing.assert_array_equal(found, dequantised(f"blk.{layer}.{short}.weight"))
    expected = dequantised("output_norm.weight") - (1 if name == "gemma" else 0)
    np.testing.assert_array_equal(ours.get_tensor("model.norm.weight"), expected)


def test_the_norms_of_a_gemma_lose_their_one(gemma):
    raw = {t.name: t.data for t in gguf.GGUFReader(gemma.parent / "tiny.gguf").tensors}
    ours = load_file(gemma / "model.safetensors")
    for theirs, name in (
        ("blk.1.attn_q_norm", "model.layers.1.self_attn.q_norm"),
        ("blk.0.post_ffw_norm", "model.layers.0.post_feedforward_layernorm"),
    ):
        expected = raw[f"{theirs}.weight"] - np.float32(1)
        np.testing.assert_array_equal(ours[f"{name}.weight"], expected)


def test_all_ends_are_in_the_configs(llama, gemma):
    for folder, ends in ((llama, [0, 2]), (gemma, [1, 8])):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == ends


def test_other_architectures_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        store_convert.convert(tmp_path / "x.gguf", tmp_path, lambda done, of: None)


def test_other_tokenizers_are_refused(tmp_path):
    for kind in (("gpt2", "llama-bpe"), ("bert", "default"), ("llama", "default")):
        meta = {"tokenizer.ggml.model": kind[0], "tokenizer.ggml.pre": kind[1]}
        with pytest.raises(UnsupportedModelError, match=kind[0]):
            store_convert.write_tokenizer(meta, tmp_path)


# --- tokenizers -----------------------------------------------------------------------------------


def tokens_of(tokenizer: Tokenizer, text: str, special: bool = False) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=special).tokens


def test_smollm_splits_every_digit(llama):
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    assert tokens_of(tokenizer, "12 the 1") == ["1", "2", "\u0120t", "he", "\u0120", "1"]
    assert tokens_of(tokenizer, "x<|im_end|>") == ["x", "<|im_end|>"]
    assert tokens_of(tokenizer, "x", special=True) == ["x"]
    assert (llama / "chat_template.jinja").read_text().startswith("{% for m in messages %}")


def test_gemma_matches_runs_before_it_merges(gemma):
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    assert tokens_of(tokenizer, "the a") == ["t", "he", "\u2581a"]
    assert tokens_of(tokenizer, " the") == ["\u2581the"]
    assert tokens_of(tokenizer, "x   the") == ["x", "   ", "t", "he"]
    assert tokens_of(tokenizer, "x    the") == ["x", "   ", "\u2581the"]
    assert tokens_of(tokenizer, "\n\n\n<td>") == ["\n\n", "\n", "<td>"]
    assert tokens_of(tokenizer, "\u00e9") == ["<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "x", special=True) == ["<bos>", "x"]
    assert not (gemma / "chat_template.jinja").exists()


@pytest.mark.slow
def test_real_tokenizers_keep_the_files_definitions(real):
    from transformers import AutoTokenizer

    name, folder, source = real
    fields = source.fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # transformers must take the pipeline of tokenizer.json as it is
    written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    in_use = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder", "added_tokens"):
        assert in_use[part] == written[part]

    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    assert set(added) == {
        token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)
    }
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            assert added[token].special
        elif kind == USER_DEFINED:
            assert not added[token].special and not added[token].normalized

    merges = written["model"]["merges"]
    if name == "smollm":
        stored = fields["tokenizer.ggml.merges"].contents()
        assert [" ".join(merge) for merge in merges] == stored
    ordinary = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, BYTE)}
    assert {piece for merge in merges for piece in merge} <= ordinary
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_real_gemma_reads_texts_as_sentencepiece_does(gemma_path):
    tokenizer = Tokenizer.from_file(str(gemma_path / "tokenizer.json"))
    assert tokenizer.encode("Hello").ids[0] == 2
    assert tokens_of(tokenizer, "2024 and") == ["2", "0", "2", "4", "\u2581and"]
    assert tokens_of(tokenizer, "a   b") == ["a", "   ", "b"]
    assert tokens_of(tokenizer, "a" + " " * 45 + "b") == ["a", " " * 31, " " * 14, "b"]
    assert tokens_of(tokenizer, "\n" * 40) == ["\n" * 31, "\n" * 9]
    assert tokens_of(tokenizer, "<tr>\t\t") == ["<tr>", "\t\t"]


@pytest.mark.slow
def test_real_smollm_has_its_chat_template(smollm_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Is 12 > 3?"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nIs 12 > 3?<|im_end|>\n<|im_start|>assistant\n"
    )
