"""Quantised copies of a target as its draft: made once, in its own vocabulary, refused in words."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")

import anydraft
from anydraft import store
from anydraft.backends import llama_cpp, self_draft
from anydraft.backends.gguf_write import write_gguf
from anydraft.errors import (
    CacheError,
    ModelError,
    ModelFileError,
    RequestError,
    UnsupportedModelError,
)
from tiny_gguf import llama_gguf
from torch_families import byte_tokenizer, stock_model

PROMPT = "abc def abc 123"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: Any) -> Any:
    before = os.environ.get("ANYDRAFT_CACHE")
    os.environ["ANYDRAFT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield store.cache_dir()
    os.environ.pop("ANYDRAFT_CACHE")
    if before is not None:
        os.environ["ANYDRAFT_CACHE"] = before


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def folder_of(family: str, root: Path) -> Path:
    stock_model(family).save_pretrained(root / family)
    byte_tokenizer().save_pretrained(root / family)
    return root / family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return folder_of("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: Any) -> Path:
    return llama_gguf(tmp_path_factory.mktemp("gguf") / "wide.gguf", kind="F16", scale=0.2)


@pytest.mark.parametrize("family", ["llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_written_file_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    """The names, the order of rotary pairs, the norms' 1, RoPE bases, windows of Gemma."""
    stock = stock_model(family)
    write_gguf(folder_of(family, tmp_path), tmp_path / "wide.gguf", family)
    vocabulary = anydraft.Vocabulary.from_hf(byte_tokenizer(), stock.config.vocab_size)
    options: Any = {"threads": 1, "type_k": "f32", "type_v": "f32"}
    model = llama_cpp.load(tmp_path / "wide.gguf", vocabulary=vocabulary, **options)
    # Within the window of those that llama.cpp runs without one.
    ids = [3 + (5 * n * n) % 90 for n in range(12 if family in ("mistral", "qwen2") else 60)]
    with torch.inference_mode():
        expected = stock(torch.tensor([ids])).logits[0]
    got = model.extend([(model.new_state(), ids, len(ids))])[0]
    model.close()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=0.02 * float(expected.std()))


def test_the_copy_drafts_and_changes_nothing(folder: Path, cache: Path, capsys: Any) -> None:
    plain = anydraft.load(str(folder)).generate(PROMPT, max_tokens=24, ignore_eos=True)
    with anydraft.load(str(folder), draft="self:q8_0", num_draft_tokens=3) as engine:
        got = engine.generate(PROMPT, max_tokens=24, ignore_eos=True)
        assert engine.drafter.model.name == "llama in q8_0"  # type: ignore[union-attr]
        assert engine.drafter.model.vocabulary is engine.vocabulary  # type: ignore[union-attr]
    assert got.token_ids == plain.token_ids
    assert got.stats.draft_n_accepted > 0.5 * got.stats.draft_n > 0
    assert "making a q8_0 copy of" in capsys.readouterr().err


def test_a_copy_is_made_once_listed_and_removed(
    wide: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    quantise = self_draft._quantise
    monkeypatch.setattr(
        self_draft, "_quantise", lambda *args: made.append(args[2]) or quantise(*args)
    )
    path = self_draft.quantised_copy(wide, "q4_0", str(wide))
    assert self_draft.quantised_copy(wide, "q4_0", str(wide)) == path
    assert made == ["q4_0"]
    assert path.parent.parent == cache / "quantised"
    assert self_draft.weight_types(path).keys() <= {"Q4_0", "Q6_K", "Q8_0"}

    os.utime(wide, ns=(1, 1))  # another file now
    assert self_draft.quantised_copy(wide, "q4_0", str(wide)) == path
    assert len(made) == 2

    entry = next(m for m in store.list_models() if m.name == path.parent.name)
    assert entry.state == "ready" and "q4_0 copy of" in entry.note and entry.size > 0
    assert store.remove(entry.name) == entry.size
    assert not path.parent.exists()
    assert list((cache / "partial").iterdir()) == []


def test_a_gguf_target_is_quantised_as_it_is(wide: Path, cache: Path) -> None:
    with anydraft.load(str(wide), draft="self:q4_0", num_draft_tokens=2) as engine:
        got = engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert len(got.token_ids) == 8 and got.stats.draft_n > 0


@pytest.mark.parametrize("spec", ["self", "self:", "self:q4", "self:f16"])
def test_unknown_types_are_refused_before_anything_is_loaded(spec: str) -> None:
    with pytest.raises(RequestError, match="known: q2_k, .*q4_0.*self:q4_0"):
        anydraft.load("no such model", draft=spec)


def test_a_target_that_is_small_already_is_refused(tmp_path: Path, cache: Path) -> None:
    small = llama_gguf(tmp_path / "small.gguf", kind="Q4_0")
    with (
        anydraft.load(str(small)) as engine,
        pytest.raises(RequestError, match="bits per weight already.*hardly be faster"),
    ):
        anydraft.load(engine.target, draft="self:q4_0")


def test_options_that_a_copy_does_not_have_are_refused(folder: Path, cache: Path) -> None:
    target = anydraft.load(str(folder)).target
    with pytest.raises(UnsupportedModelError, match="drafts in llama_cpp, not in torch_hf"):
        anydraft.load(target, draft="self:q8_0", draft_options={"runtime": "torch_hf"})
    with pytest.raises(ModelError, match="dtype 'int4' cannot be chosen"):
        anydraft.load(target, draft="self:q8_0", draft_options={"dtype": "int4"})


def test_a_model_without_files_is_refused() -> None:
    target = (stock_model("llama"), byte_tokenizer())
    with pytest.raises(RequestError, match="not loaded from files"):
        anydraft.load(target, draft="self:q4_0")


def test_another_architecture_is_refused_with_a_way_out(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2.*convert_hf_to_gguf"):
        self_draft.quantised_copy(folder_of("gpt2", tmp_path), "q4_0", "gpt2")
    assert not any(m.name.startswith("gpt2") for m in store.list_models())


def test_damaged_and_missing_weights_are_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors cannot be read"):
        self_draft.quantised_copy(broken, "q4_0", "broken")
    weights.unlink()
    with pytest.raises(ModelFileError, match="made from safetensors, and .* holds no"):
        self_draft.quantised_copy(broken, "q4_0", "broken")


def test_a_full_disk_leaves_nothing(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
        with pytest.raises(CacheError, match="needs .* and 0 MB are free: make room"):
            self_draft.quantised_copy(folder, "q5_0", "full")
    with limited_files(10_000), pytest.raises(CacheError):
        self_draft.quantised_copy(folder, "q5_0", "full")
    assert not list((cache / "partial").iterdir())


def test_the_quantiser_running_out_of_disk_is_said(wide: Path, cache: Path, tmp_path: Path) -> None:
    with limited_files(8192), pytest.raises(CacheError, match="cannot be written.*make room"):
        self_draft._quantise(wide, tmp_path / "model.gguf", "q4_0", "wide")


def test_without_the_extra_the_install_line_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anydraft.backends import llama_library

    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    llama_library.library.cache_clear()
    try:
        with pytest.raises(ModelError, match=r"pip install 'anydraft\[llama-cpp\]'"):
            anydraft.load(str(folder), draft="self:q4_0")
    finally:
        monkeypatch.undo()
        llama_library.library.cache_clear()


@pytest.mark.slow
def test_on_real_weights_the_copy_agrees(smollm_path: Path) -> None:
    right = drafted = 0
    with anydraft.load(smollm_path, draft="self:q4_0", num_draft_tokens=4) as engine:
        for text in (
            "The steam engine was invented",
            "To bake bread,",
            "def mean(values):",
            "1, 2,",
        ):
            got = engine.generate(text, max_tokens=48, ignore_eos=True)
            plain = engine.generate(text, max_tokens=48, ignore_eos=True, num_draft_tokens=0)
            assert got.token_ids == plain.token_ids
            right += got.stats.accepted_at[0]
            drafted += got.stats.drafted_at[0]
        types = self_draft.weight_types(Path(engine.drafter.model.origin["path"]))
    print(json.dumps(types), f"first candidates accepted: {right} of {drafted}")
    assert right / drafted > 0.6
    assert types["Q4_0"] > 0.7
