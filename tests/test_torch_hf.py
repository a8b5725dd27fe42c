"""The PyTorch backend: what it computes, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anydraft.backends import load_model, torch_hf
from anydraft.backends.torch_plan import CHUNK, LengthRope, cut_pieces
from anydraft.errors import (
    ModelError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    VocabularyError,
)
from torch_families import byte_tokenizer, small_config, stock_model

FUSED = ["llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gemma3"]
MODULES = ["gemma2", "gpt_oss", "gpt2", "gpt_neox"]


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 96), k=count)


def stock_logits(family: str, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = stock_model(family)(input_ids=torch.tensor([ids])).logits[0]
    return logits


def from_stock(family: str, **options: Any) -> torch_hf.TorchModel:
    return torch_hf.from_objects(stock_model(family), byte_tokenizer(), name=family, **options)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved llama with its tokenizer."""
    stock_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", [*FUSED, *MODULES, "bloom"])
def test_long_prompts_match_the_stock_model(family: str) -> None:
    """Blocks, then rows, far beyond the window, against one stock pass over everything."""
    ids = random_ids(2 * CHUNK + 40)
    model, expected = from_stock(family), stock_logits(family, ids)
    state = model.new_state()
    [first] = model.extend([(state, ids[:-9], 2)])
    [rest] = model.extend([(state, ids[-9:], 9)])
    torch.testing.assert_close(torch.cat([first, rest]), expected[-11:], rtol=1e-4, atol=5e-4)


@pytest.mark.slow
def test_each_family_runs_in_the_engine_meant_for_it() -> None:
    kinds = {family: from_stock(family).engine.kind for family in [*FUSED, *MODULES, "bloom"]}
    assert {kinds[family] for family in FUSED} == {"fused"}
    assert {kinds[family] for family in MODULES} == {"modules"}
    assert kinds["bloom"] == "stock"


def test_an_output_layer_cut_to_some_ids() -> None:
    """Tied to the embedding (Gemma) it is cut; packed apart (Llama) it is left as it is."""
    ids, kept = random_ids(12), [2, 5, 17, 64, 95]
    whole, cut = from_stock("gemma3"), from_stock("gemma3")
    assert cut.keep_outputs(kept)
    [expected] = whole.extend([(whole.new_state(), ids, 3)])
    [got] = cut.extend([(cut.new_state(), ids, 3)])
    torch.testing.assert_close(got[:, kept], expected[:, kept], rtol=1e-5, atol=1e-5)
    others = [i for i in range(got.shape[1]) if i not in kept]
    assert (got[:, others] == -torch.inf).all()
    [none] = cut.extend([(cut.new_state(), ids, 0)])
    assert none.shape == (0, got.shape[1])
    apart = from_stock("llama")
    assert not apart.keep_outputs(kept)
    [row] = apart.extend([(apart.new_state(), ids, 1)])
    assert torch.isfinite(row).all()


@pytest.mark.slow
def test_a_draft_of_fewer_tokens_has_a_smaller_output_layer(tmp_path: Path) -> None:
    """Loaded by name it is cut; an object, which may be the target itself, is not."""
    import anydraft

    stock_model("gemma3").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    few = {"vocabulary": 40}
    request: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with anydraft.load(str(tmp_path), str(tmp_path), draft_settings=few) as engine:
        drafter: Any = engine.drafter
        assert drafter.model.engine.kept is not None
        assert engine.target.engine.kept is None  # type: ignore[attr-defined]
        answer = engine.generate("hello", **request)
        assert answer.token_ids == engine.plain().generate("hello", **request).token_ids
        assert answer.stats.draft_n_accepted > 0
        own = anydraft.load(engine.target, engine.target, draft_settings=few)
        assert own.generate("hello", **request).token_ids == answer.token_ids
        assert engine.target.engine.kept is None  # type: ignore[attr-defined]


def test_drafted_tokens_do_not_change_how_a_prompt_is_processed() -> None:
    """The same bits for the prompt's last row, with and without candidates behind it."""
    model, ids = from_stock("llama"), random_ids(3 * CHUNK)
    assert model.width_exact
    for length in (20, 33, CHUNK + 1, 2 * CHUNK + 50):
        alone, drafted = model.new_state(), model.new_state()
        [plain] = model.extend([(alone, ids[:length], 1)])
        [rows] = model.extend([(drafted, ids[: length + 6], 7)])
        assert torch.equal(plain[0], rows[0]), length


def test_pieces_end_where_positions_say() -> None:
    rope = LengthRope(None)
    for drafted in (0, 5):
        pieces = cut_pieces(0, 10, 600 + drafted, 1 + drafted, 256, rope)
        blocks = [(p.start, p.end) for p in pieces if not p.by_row]
        assert blocks == [(10, 256), (256, 512), (512, 609)]
        assert sum(p.num_logits for p in pieces) == 1 + drafted


def test_an_interrupt_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = from_stock("llama"), random_ids(60)
    one, two = model.new_state(), model.new_state()
    [expected] = model.extend([(two, ids[:12], 2)])
    two.rollback(0)
    model.extend([(one, ids[:10], 0)])
    run, calls = model.engine.rows, []

    def interrupted(*args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(model.engine, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):  # in the second pass, after the first one wrote
        model.extend([(one, ids[10:12], 2), (two, ids, 0)])
    assert (one.length, two.length) == (10, 0)
    monkeypatch.undo()
    [again] = model.extend([(one, ids[10:12], 2)])
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def test_objects_in_memory_are_left_alone() -> None:
    from transformers import AutoModelForCausalLM

    for family in ("llama", "gpt2"):
        torch.manual_seed(3)
        user = AutoModelForCausalLM.from_config(small_config(family)).train()
        before = {name: tensor.clone() for name, tensor in user.state_dict().items()}
        implementation, modules = (
            user.config._attn_implementation,
            [type(m) for m in user.modules()],
        )
        model = torch_hf.from_objects(user, byte_tokenizer())
        state = model.new_state()
        model.extend([(state, random_ids(20), 1)])
        model.close()
        assert user.training and user.config._attn_implementation == implementation
        assert [type(m) for m in user.modules()] == modules
        assert all(torch.equal(before[k], v) for k, v in user.state_dict().items())
        user(input_ids=torch.tensor([[4, 5, 6]]))


def length_rope_config(kind: str) -> Any:
    config = small_config("llama")
    half = [1.0 + 0.5 * i for i in range(6)]
    config.max_position_embeddings = 64 if kind == "dynamic" else 160
    config.rope_parameters = {
        "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "longrope": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 40, "short_factor": [1.0] * 6, "long_factor": half,
        },
    }[kind]  # fmt: skip
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_depends_on_length(kind: str) -> None:
    """However the tokens come, rows are as one at a time: no pass straddles the switch."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    stock = AutoModelForCausalLM.from_config(length_rope_config(kind)).eval()
    model = torch_hf.from_objects(stock, byte_tokenizer())
    model.max_length = 150  # a dynamic rope goes on beyond the length it was made for
    assert model.engine.kind != "fused"
    switch = model._rope.switch
    assert switch == (64 if kind == "dynamic" else 40)
    ids, state, other = random_ids(150), model.new_state(), model.new_state()
    plain = torch.cat([model.extend([(state, [i], 1)])[0] for i in ids])
    for start in (switch + 30, switch, switch - 3, switch - 12):
        state.rollback(start)
        other.rollback(0)
        model.extend([(other, ids[: switch + 4], 0)])
        got, _ = model.extend([(state, ids[start : start + 8], 8), (other, [7], 1)])
        torch.testing.assert_close(got, plain[start : start + 8], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    ["MambaConfig", "JambaConfig", "RwkvConfig", "Qwen3NextConfig", "T5Config"],
)
def test_models_that_cannot_forget_are_refused(make: str, tmp_path: Path) -> None:
    import transformers

    getattr(transformers, make)().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(tmp_path)
    assert ("encoder" if make == "T5Config" else "recurrent") in str(caught.value)


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertLMHeadModel"])
def test_encoders_are_refused(architecture: str, tmp_path: Path) -> None:
    """By name, and where the name does not say it, by what the model does."""
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    BertLMHeadModel(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": [architecture]}))
    with pytest.raises(UnsupportedModelError, match="causal"):
        load_model(tmp_path)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_model(tmp_path / "nothing-here")
    with pytest.raises(UnsupportedModelError, match="unknown runtime"):
        load_model("x", runtime="abacus")
    with pytest.raises(ModelError):
        torch_hf.from_objects(stock_model("llama"), byte_tokenizer(), context_length=10**6)


def test_a_truncated_weight_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="truncated"):
        load_model(folder)


def test_missing_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match="lacks 1 weights"):
        load_model(folder)


def test_a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")
    with pytest.raises(ModelFileError):
        load_model(folder)


def test_a_model_type_nobody_knows(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "abacus", "architectures": ["Abacus"]}')
    with pytest.raises(UnsupportedModelError):
        load_model(folder)


def test_a_broken_gguf(tmp_path: Path) -> None:
    for name, data in (("a.gguf", b"GGUF\x03\x00\x00\x00" + b"\x00" * 64), ("b.gguf", b"hello")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelFileError):
            load_model(tmp_path / name, runtime="torch_hf")


def test_no_tokenizer(tmp_path: Path) -> None:
    stock_model("llama").save_pretrained(tmp_path)
    with pytest.raises(VocabularyError, match="tokenizer"):
        load_model(tmp_path)


def test_a_folder_is_what_was_saved(folder: Path) -> None:
    model = load_model(folder, dtype="float32", context_length=100)
    state, ids = model.new_state(), random_ids(30)
    [got] = model.extend([(state, ids, 30)])
    torch.testing.assert_close(got, stock_logits("llama", ids), rtol=1e-4, atol=1e-4)
    assert model.max_length == 100 and model.vocabulary.eos_ids == {2}
    model.close()


def test_a_vocabulary_without_an_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        found = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in found.items() if "eos" not in k}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    model = load_model(folder, dtype="float32")
    assert model.vocabulary.eos_ids == frozenset()
    model.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_follows_the_stock_model(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype)
    state, ids = model.new_state(), random_ids(40)
    [got] = model.extend([(state, ids, 40)])
    expected = stock_logits("llama", ids)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()
    model.close()
