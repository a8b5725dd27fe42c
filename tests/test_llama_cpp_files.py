"""Files and settings that llama_cpp refuses: one clear error each, and never an abort."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydraft.backends import infer_runtime, load_model
from anydraft.errors import (
    AnydraftError,
    ModelError,
    ModelFileError,
    ModelNotFoundError,
    StateError,
    UnsupportedModelError,
    VocabularyError,
)
from tiny_gguf import gemma_gguf, llama_gguf

pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")

from anydraft.backends import llama_cpp, llama_library, llama_loading


def small(path: Path, architecture: str, **keys: Any) -> Path:
    """A GGUF file with one tensor and these keys; dots are written as two underscores."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        key = name.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENS = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__tokens": [f"<0x{byte:02X}>" for byte in range(256)],
    "tokenizer__ggml__token_type": [6] * 256,
    "tokenizer__ggml__scores": [0.0] * 256,
}


HYPERPARAMETERS: dict[str, Any] = {
    "llama__attention__layer_norm_rms_epsilon": 1e-5,
    "llama__context_length": 32, "llama__embedding_length": 32, "llama__block_count": 1,
    "llama__feed_forward_length": 32, "llama__attention__head_count": 1,
}  # fmt: skip


def mamba(path: Path) -> Path:
    """A recurrent model that llama.cpp loads."""
    writer = gguf.GGUFWriter(path, "mamba")
    hidden, inner, state, rank, tokens = 32, 64, 8, 4, 256
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{byte:02X}>" for byte in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    writer.add_token_types([6] * tokens)
    shapes = {
        "token_embd.weight": (tokens, hidden), "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,), "blk.0.ssm_in.weight": (2 * inner, hidden),
        "blk.0.ssm_conv1d.weight": (inner, 4), "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner), "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,), "blk.0.ssm_a": (inner, state), "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (hidden, inner),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cut(path: Path, keep: float) -> Path:
    data = llama_gguf(path).read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def split(path: Path) -> Path:
    """The first of three parts, alone."""
    return small(path.parent / "m-00001-of-00003.gguf", "llama", split__count=3, split__no=0)


def broken(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


Case = tuple[Callable[[Path], Path], type[AnydraftError], str]
CASES: dict[str, Case] = {
    "empty": (lambda p: broken(p, b""), ModelFileError, "truncated"),
    "no gguf": (lambda p: broken(p, b"PK\x03\x04" * 20), ModelFileError, "not a readable GGUF"),
    "cut in the header": (lambda p: cut(p, 0.02), ModelFileError, "ends inside its header"),
    "cut in the tensors": (lambda p: cut(p, 0.9), ModelFileError, "is truncated: it holds"),
    "counts gone wild": (
        lambda p: broken(p, b"GGUF\3\0\0\0" + b"\xff" * 64), ModelFileError, "truncated"),
    "version": (lambda p: broken(p, b"GGUF\1\0\0\0" + b"\0" * 64), ModelFileError, "version 1"),
    "unknown architecture": (
        lambda p: small(p, "fancynet", **TOKENS), UnsupportedModelError,
        "does not know the architecture 'fancynet'"),
    "no tokenizer": (lambda p: small(p, "llama"), VocabularyError, "no tokenizer"),
    "no vocabulary": (
        lambda p: small(p, "llama", tokenizer__ggml__model="none"), VocabularyError,
        "no tokenizer"),
    "unknown tokenizer": (
        lambda p: small(p, "llama", **HYPERPARAMETERS, **{
            **TOKENS, "tokenizer__ggml__model": "magic"}),
        UnsupportedModelError, "cannot read its tokenizer"),
    "tokens twice": (
        lambda p: small(p, "llama", **{**TOKENS, "tokenizer__ggml__tokens": ["a"] * 256}),
        VocabularyError, "there twice"),
    "no byte tokens": (
        lambda p: small(p, "llama", **{
            **TOKENS, "tokenizer__ggml__tokens": [f"t{i}" for i in range(256)]}),
        VocabularyError, "no token for 256 of the 256 bytes"),
    "bos outside": (
        lambda p: small(p, "llama", tokenizer__ggml__bos_token_id=999, **TOKENS),
        VocabularyError, "bos_token_id is 999"),
    "fewer types": (
        lambda p: small(p, "llama", **{**TOKENS, "tokenizer__ggml__token_type": [6] * 9}),
        VocabularyError, "types for fewer"),
    "projector": (lambda p: small(p, "clip", general__type="mmproj"), UnsupportedModelError,
                  "projector"),
    "adapter": (lambda p: small(p, "llama", general__type="adapter"), UnsupportedModelError,
                "holds no model"),
    "encoder": (lambda p: small(p, "bert", **TOKENS), UnsupportedModelError, "embedding model"),
    "embedding model": (
        lambda p: small(p, "qwen3", qwen3__pooling_type=3, **TOKENS), UnsupportedModelError,
        "embedding model"),
    "drafting head": (lambda p: small(p, "eagle3", **TOKENS), UnsupportedModelError,
                      "drafting head"),
    "missing tensors": (
        lambda p: small(p, "llama", **TOKENS), ModelFileError, "llama.cpp cannot load it"),
    "split, a part missing": (split, ModelFileError, "2 are missing beside it: m-00002-of-00003"),
    "recurrent": (mamba, UnsupportedModelError, "recurrent layers (mamba)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_cannot_run(case: str, tmp_path: Path, capfd: Any) -> None:
    make, kind, words = CASES[case]
    path = make(tmp_path / "model.gguf")
    with pytest.raises(kind) as raised:
        load_model(path)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""  # what the library says goes to the logger


def test_the_other_parts_of_a_split_file_are_checked(tmp_path: Path) -> None:
    first = split(tmp_path / "x")
    for number in (2, 3):
        part = tmp_path / f"m-0000{number}-of-00003.gguf"
        small(part, "llama", split__count=3, split__no=number - 1)
    part.write_bytes(part.read_bytes()[:-64])
    with pytest.raises(ModelFileError, match="m-00003-of-00003.gguf is truncated"):
        load_model(first)
    with pytest.raises(ModelFileError, match="is part 2 of 3: name the first"):
        load_model(tmp_path / "m-00002-of-00003.gguf")


def test_without_the_extra_the_install_line_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    llama_library.library.cache_clear()
    try:
        with pytest.raises(ModelError, match=r"pip install 'anydraft\[llama-cpp\]'"):
            load_model(llama_gguf(tmp_path / "m.gguf"))
    finally:
        llama_library.library.cache_clear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_ctx": 10**12}, "GB are free"),
        ({"n_ctx": 0}, "n_ctx must be a whole number"),
        ({"n_seq_max": 100_000}, "llama.cpp allows"),
        ({"type_k": "q9"}, "unknown type_k"),
        ({"type_v": "q8_0", "flash_attn": "off"}, "needs flash attention"),
        ({"flash_attn": "perhaps"}, "known: auto, off, on"),
        ({"dtype": "float32"}, "cannot be chosen for a GGUF file"),
        ({"device": "tpu"}, "unknown device"),
        ({"gpu_layers": 3}, "unknown option 'gpu_layers'"),
        ({"context_length": 100_000}, "outside 1 to 128"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as raised:
        load_model(llama_gguf(tmp_path / "m.gguf"), **options)
    assert words in str(raised.value)


@pytest.mark.slow
def test_growing_beyond_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama_cpp.load(llama_gguf(tmp_path / "m.gguf", context=4096), threads=1)
    state, other = model.new_state(), model.new_state()
    model.extend([(state, [5] * 2000, 0)])
    monkeypatch.setattr(llama_cpp, "free_memory", lambda: 1000)
    with pytest.raises(StateError, match="0.0 GB are free"):
        model.extend([(other, [6] * 2000, 1)])
    assert (state.length, other.length) == (2000, 0)
    monkeypatch.undo()
    [row] = model.extend([(other, [6] * 2000, 1)])
    assert row.isfinite().all()
    model.close()


def test_n_ctx_used_up(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path / "m.gguf", context=4096)
    model = llama_cpp.load(path, threads=1, n_ctx=256, cache_prompt=False)
    assert model.max_length == 256
    state, other = model.new_state(), model.new_state()
    model.extend([(state, [5] * 200, 0)])
    with pytest.raises(StateError, match="used up by 2 states"):
        model.extend([(other, [6] * 100, 1)])
    assert (state.length, other.length) == (200, 0)
    state.close()
    model.extend([(other, [6] * 100, 1)])
    model.close()


def test_the_sequence_limit(tmp_path: Path) -> None:
    model = llama_cpp.load(llama_gguf(tmp_path / "m.gguf"), threads=1, n_seq_max=2)
    states = [model.new_state(), model.new_state()]
    with pytest.raises(StateError, match=r"all 2 sequences are in use \(n_seq_max\)"):
        model.new_state()
    states.pop().close()
    states.append(model.new_state())
    states.clear()  # nobody closed these two: collected, they are free again
    assert model.new_state().length == 0
    model.close()


def test_a_file_that_vanished_and_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_model(tmp_path / "gone.gguf")
    (tmp_path / "several").mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"):
        llama_gguf(tmp_path / "several" / name)
    with pytest.raises(ModelNotFoundError, match="several GGUF files; choose one"):
        load_model(tmp_path / "several")
    assert infer_runtime(tmp_path / "several") == infer_runtime("x.gguf") == "llama_cpp"
    assert infer_runtime("org/name:Q4_K_M") == infer_runtime("org/name-GGUF") == "llama_cpp"
    assert infer_runtime("org/name") == infer_runtime("smollm2-135m") == "torch_hf"
    assert infer_runtime("smollm2-135m", "llama_cpp") == "llama_cpp"
    with pytest.raises(UnsupportedModelError, match="unknown runtime 'onnx'"):
        infer_runtime("x.gguf", "onnx")


def test_memory_of_a_cell() -> None:
    """Gemma 3 270M: 18 layers, one head of 256 for keys and one for values, two bytes each."""
    from anydraft.gguf_file import GgufHeader

    meta = {"block_count": 18, "attention.head_count": 4, "attention.head_count_kv": 1,
            "attention.key_length": 256, "attention.value_length": 256}  # fmt: skip
    full = {f"gemma3.{name}": value for name, value in meta.items()}
    header = GgufHeader(Path("x"), {"general.architecture": "gemma3", **full}, [], 0)
    options = llama_loading.Options()
    assert llama_loading.cell_bytes(header, options) == 18 * 2 * 256 * 2
    header.meta["gemma3.attention.head_count_kv"] = [1, 2, 0]
    assert llama_loading.cell_bytes(header, options) == 3 * 2 * 256 * 2


@pytest.mark.slow
def test_nothing_but_the_error_on_stderr(tmp_path: Path) -> None:
    """A whole process: the library neither aborts it nor prints into it."""
    for make in (lambda p: cut(p, 0.5), lambda p: small(p, "fancynet", **TOKENS), gemma_gguf):
        path = make(tmp_path / "model.gguf")
        command = [sys.executable, "-m", "anydraft.cli.main", "generate", "--target", str(path)]
        command += ["--prompt", "the", "--max-tokens", "2", "--quiet"]
        ran = subprocess.run(command, capture_output=True, text=True)
        if make is gemma_gguf:
            assert (ran.returncode, ran.stderr) == (0, "")
        else:
            assert ran.returncode == 3 and len(ran.stderr.splitlines()) == 1
            assert ran.stderr.startswith("anydraft: ") and ran.stdout == ""
