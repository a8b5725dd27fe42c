"""Drafts with 4-bit weights: the kernel does what it says, and a target's tokens never change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import anydraft
from anydraft.backends import torch_pack
from anydraft.backends.torch_hf import load
from torch_families import byte_tokenizer

pytestmark = pytest.mark.skipif(
    not torch_pack.int4_is_there(), reason="this PyTorch or CPU has no 4-bit products"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random Llama whose layers the 4-bit kernel takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_multiplies_by_the_rounded_weights(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(128, 48, bias=bias).bfloat16().float().requires_grad_(False)
    packed = torch_pack.PackedLinear(
        layer.weight.bfloat16(), layer.bias.bfloat16() if bias else None, int4=True
    )
    assert packed.kernel.name == "int4"
    holder = nn.Sequential(layer)
    torch_pack.round_to_int4(holder)
    x = torch.randn(rows, 128).bfloat16()
    expected = layer(x.float())
    got = packed(x).float()
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


def test_rounding_keeps_sixteen_levels_of_each_group_and_is_done_once() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 16))
    before = layer[0].weight.detach().clone()
    torch_pack.round_to_int4(layer)
    after = layer[0].weight.detach().clone()
    groups = after.view(16, 2, 32)
    assert all(len(g.unique()) <= 16 for row in groups for g in row)
    spread = before.view(16, 2, 32).amax(-1) - before.view(16, 2, 32).amin(-1)
    worst = (after - before).view(16, 2, 32).abs().amax(-1)
    assert (worst <= spread / 15 / 2 * 1.01).all()
    torch_pack.round_to_int4(layer)
    assert torch.allclose(layer[0].weight, after, atol=1e-6)


def test_shapes_that_the_kernel_does_not_take_stay_as_they_are() -> None:
    odd = torch_pack.PackedLinear(torch.randn(20, 33).bfloat16(), int4=True)
    assert odd.kernel.name != "int4"
    assert odd(torch.randn(2, 33).bfloat16()).shape == (2, 20)


def test_a_draft_has_four_bits_by_default_and_the_target_keeps_its_own(folder: Path) -> None:
    engine = anydraft.load(folder, draft=folder)
    assert engine.target.dtype == torch.float32
    draft = engine.drafter.model
    assert [m.kernel.name for m in draft.engine.linears] == ["int4"] * 8
    assert draft.engine.head.kernel.name != "int4"
    request = {"prompt": "steam", "max_tokens": 24, "ignore_eos": True}
    for law in ({}, {"temperature": 1.0, "seed": 3}):
        plain = engine.plain().generate(**request, **law)
        got = engine.generate(**request, **law)
        assert got.token_ids == plain.token_ids
        assert got.stats.draft_n > 0
    engine.close()


@pytest.mark.parametrize("engine", ["fused", "modules"])
def test_four_bits_in_every_engine_that_packs(folder: Path, engine: str) -> None:
    model = load(folder, dtype="int4", engine=engine)
    stock = load(folder, dtype="float32", engine=engine)
    ids = [5, 9, 17, 30, 8]
    rows = [m.extend([(m.new_state(), ids, 5)])[0] for m in (model, stock)]
    assert (rows[0] - rows[1]).abs().max() < 0.4 * rows[1].abs().max()  # near, and not the same
    assert not torch.equal(*rows)
    model.close()
    stock.close()
