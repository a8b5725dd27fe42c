"""The quick arg-max is the arg-max: on ties, outliers, forbidden ids, at every width."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anydraft
from anydraft.backends import torch_hf
from anydraft.backends.torch_argmax import ArgmaxHead, exact_int8_is_there
from anydraft.backends.torch_loading import FileRows
from anydraft.errors import NumericsError
from anydraft.sampling import Sampler, SamplingParams
from anydraft.vocabulary import Vocabulary

pytestmark = pytest.mark.skipif(
    not exact_int8_is_there(), reason="no quick exact 8-bit products on this CPU"
)


def exact_best(weight: torch.Tensor, x: torch.Tensor, forbidden: list[int]) -> int:
    """By sums without rounding: every product of two float32 is exact in double."""
    sums = [math.fsum(row) for row in (weight.double() * x.double()).tolist()]
    allowed = [i for i in range(len(sums)) if i not in forbidden]
    return max(allowed, key=lambda i: (sums[i], -i))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 900),
    hidden=st.sampled_from([1, 3, 16, 33, 64]),
    rows=st.integers(1, 8),
    kind=st.sampled_from(["normal", "outliers", "copies", "tiny", "levels"]),
)
def test_it_is_the_exact_argmax(seed: int, size: int, hidden: int, rows: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, hidden, generator=generator)
    x = torch.randn(rows, hidden, generator=generator)
    if kind == "outliers":
        weight[:, 0] *= 300
        x[:, -1] *= 5000
    elif kind == "copies":  # ties, and near-ties one bit apart
        weight[1:] = weight[0]
        weight[size // 2] = torch.nextafter(weight[0], torch.tensor(9.0))
    elif kind == "tiny":
        weight *= 1e-30
        x *= 1e-7
    elif kind == "levels":  # few distinct values: many exact ties
        weight, x = weight.round(), x.round()
    forbidden = torch.randint(size, (rows, 2), generator=generator).tolist() if size > 3 else []
    banned = forbidden or [[] for _ in range(rows)]
    best = ArgmaxHead(weight, weight).best(x, banned)
    assert best.tolist() == [
        exact_best(weight, row, ids) for row, ids in zip(x, banned, strict=True)
    ]


@pytest.mark.parametrize("alike", [80, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_very_unsure(dtype: torch.dtype, alike: int) -> None:
    """Many candidates with exact ties among them; so many that all products come first."""
    weight = (torch.ones(3000, 32) + 1e-3 * torch.randn(3000, 32)).to(dtype)
    weight[alike:] /= 2
    weight[alike // 2 : alike // 2 + 20] = weight[torch.argmax(weight.float().sum(1))]
    x = torch.ones(3, 32) + 1e-3 * torch.randn(3, 32)
    best = ArgmaxHead(weight, weight).best(x, [(), (5,), ()])
    expected = [exact_best(weight, row, ids) for row, ids in zip(x, ([], [5], []), strict=True)]
    assert best.tolist() == expected


def test_a_row_without_a_best_id_is_an_error() -> None:
    weight = torch.randn(40, 16)
    head = ArgmaxHead(weight, weight)
    for value in (math.nan, math.inf):
        x = torch.ones(2, 16)
        x[1, 3] = value
        with pytest.raises(NumericsError, match="NaN or infinity"):
            head.best(x, [(), ()])
    with pytest.raises(NumericsError, match="every id is forbidden"):
        head.best(torch.ones(1, 16), [range(40)])
    assert head.best(torch.zeros(1, 16), [(0, 1)]).tolist() == [2]  # all the same: the lowest


def test_saturating_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some CPUs add pairs of products in 16 bits."""

    def saturating(self: ArgmaxHead, codes: torch.Tensor) -> torch.Tensor:
        weights = self._sample.float().view(1, 64, -1, 2)
        pairs = (codes + 128).view(len(codes), 1, -1, 2) * weights
        sums = pairs.sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * weights.sum((2, 3))
        return torch.nn.functional.pad(sums * self._scale[:64], (0, len(self._scale) - 64))

    monkeypatch.setattr(ArgmaxHead, "_products", saturating)
    with pytest.raises(ArithmeticError, match="not exact"):
        ArgmaxHead(torch.randn(100, 16), torch.zeros(100, 16))


def test_rows_come_from_the_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(50, 6).to(dtype)
        file = tmp_path / "m.safetensors"
        save_file({"first": torch.zeros(3), "w": weight}, str(file))
        rows = FileRows(file, "w", weight)
        ids = torch.tensor([49, 0, 7, 7])
        assert torch.equal(rows[ids], weight[ids])
        assert torch.equal(rows[10:31], weight[10:31])
        assert torch.equal(rows[:50], weight)


def model_with(tied: bool) -> torch_hf.TorchModel:
    import transformers as t

    from torch_families import byte_tokenizer

    torch.manual_seed(1)
    config = t.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return torch_hf.from_objects(t.LlamaForCausalLM(config), byte_tokenizer())


@pytest.mark.parametrize("tied", [True, False])
def test_extend_greedy_agrees_with_the_logits(tied: bool) -> None:
    model = model_with(tied)
    assert model.engine.finds_argmax == tied
    a, b = model.new_state(), model.new_state()
    ids = list(range(5, 45))
    [logits] = model.extend([(a, ids, 40)])
    a.rollback(0)
    best, other = model.extend_greedy([(a, ids, 40), (b, ids[:7], 3)], [[3, 9], None])
    assert torch.allclose(other, logits[4:7], atol=1e-5)
    if tied:
        logits[:, [3, 9]] = -torch.inf
        assert best.tolist() == logits.argmax(1).tolist()
    else:
        assert torch.equal(best, logits)  # nothing quicker there
    for start in range(0, 40, 3):  # width makes no difference
        a.rollback(start)
        [part] = model.extend_greedy(
            [(a, ids[start : start + 3], len(ids[start : start + 3]))], [[3, 9]]
        )
        assert torch.equal(part, best[start : start + 3])


def test_when_the_argmax_is_all_that_is_needed() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"b", None, b"c"], eos_ids=[2], controls={2: "<e>"})

    def mask(**fields: object) -> list[int] | None:
        return Sampler(SamplingParams(**fields), vocabulary, 1).argmax_mask()  # type: ignore[arg-type]

    assert mask() == []
    assert mask(ignore_eos=True) == [2]
    assert mask(logit_bias={1: -math.inf}) == [1]
    assert mask(top_p=0.5, top_k=2) == []  # truncation does not move the best
    for fields in (
        {"temperature": 0.1}, {"logit_bias": {1: 2.0}}, {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1}, {"presence_penalty": 0.1}, {"bad_words": ((0, 1),)},
        {"min_tokens": 2}, {"processors": (lambda ids, logits: logits,)},
    ):  # fmt: skip
        assert mask(**fields) is None


def test_engines_say_the_same_with_and_without_logits() -> None:
    """Asking for log-probabilities takes the other way through the model."""
    engine = anydraft.Engine(model_with(True), None)
    for prompt in ([5, 6, 7], [40, 41], list(range(3, 90, 7))):
        quick = engine.generate(prompt, max_tokens=30, ignore_eos=True)
        full = engine.generate(prompt, max_tokens=30, ignore_eos=True, logprobs=0)
        assert quick.token_ids == full.token_ids
        assert full.logprobs is not None and len(full.logprobs) == 30
