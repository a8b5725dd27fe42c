"""Packed linear layers at any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from anydraft.backends import torch_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 40, 48, 49, 130])
def test_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    kernels = [torch_pack._KERNELS[name] for name in torch_pack._candidates(weight)]
    for make in kernels:
        out = make(weight).call(x, bias)
        assert out.shape == (rows, 48)
        assert out.is_contiguous()
        torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=2e-2, atol=1e-4)
