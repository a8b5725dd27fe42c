"""Linear layers prepacked for the CPU, with kernels whose rows do not depend on how many there are.

A verification pass over n rows pays only if it costs little more than one over a single row.
PyTorch's `F.linear` packs the weights anew on every call with more than one row; MKL and oneDNN can
keep them packed. Both are also *width-exact* where `width_exact` says so: a row has the same bits
whether it is computed alone or among others, so a target draws the same tokens with a draft as
without.

The kernel is chosen by shape, dtype and platform, never by the width of a pass.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HINT = 32
"""The number of rows that packing is laid out for. Any number may be computed; 32 costs one row
nothing and halves the cost of sixteen."""
_WIDTHS = (1, 2, 3, 5, 8)
_STEP = 16
"""oneDNN keeps a megabyte or two for each number of rows it has met: many rows are rounded up to a
multiple of this, or every new length of a prompt would add that much."""
INT4_GROUP = 32
"""Weights that share a scale and a zero."""

Call = Callable[[Tensor, Tensor | None], Tensor]
"""(rows, in), bias or None -> (rows, out)."""


@dataclass(frozen=True)
class Kernel:
    """Packed weights and how to multiply by them."""

    name: str
    call: Call
    packed: Tensor | None = None
    shape: Tensor | None = None
    """For "mkl": a tensor of the original weights' shape. For "int4": scales and zeros."""
    width_exact: bool = False


_exact: dict[tuple[str, int, int, torch.dtype], bool] = {}


class PackedLinear(nn.Module):
    """A linear layer with its own packed copy of its weights (shared where none is faster)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, int4: bool = False) -> None:
        """`weight` is (out, in), `bias` (out,). `int4` rounds the weights, for a draft."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        fits = int4 and fits_int4(self.out_features, self.in_features)
        self.kernel = _int4(weight.detach()) if fits else _choose(weight.detach())
        self._call = self.kernel.call

    @property
    def width_exact(self) -> bool:
        """Whether a row has the same bits at any number of rows."""
        return self.kernel.width_exact

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if x.dim() == 2:
            return self._call(x, self.bias)
        rows = self._call(x.reshape(-1, self.in_features), self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


def pack_modules(module: nn.Module, *, int4: bool = False) -> None:
    """Replace every plain Linear and Conv1D inside `module` by a PackedLinear, freeing as it goes.

    Tied output layers keep their embedding: only the layer's own reference to it goes away.
    """
    from transformers.pytorch_utils import Conv1D

    for parent in list(module.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias, int4=int4))
            elif type(child) is Conv1D:
                setattr(parent, name, PackedLinear(child.weight.t(), child.bias, int4=int4))


def trim_memory() -> None:
    """Give freed memory back to the system, where the C library can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass


def _choose(weight: Tensor) -> Kernel:
    """The first width-exact kernel of this platform's list, else the first of the list."""
    fallback: Kernel | None = None
    for name in _candidates(weight):
        kernel = _KERNELS[name](weight)
        if _probe(weight, kernel):
            return replace(kernel, width_exact=True)
        fallback = fallback or kernel
    assert fallback is not None  # "plain" is always a candidate
    return fallback


def _candidates(weight: Tensor) -> list[str]:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return ["plain"]
    names = []
    if weight.dtype == torch.float32:
        mkl: Any = torch.backends.mkl
        if mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
            names.append("mkl")
        if _has_onednn():
            names += ["onednn", "onednn_pairs"]
    elif weight.dtype == torch.bfloat16 and bfloat16_is_fast():
        names.append("onednn")
    return [*names, "plain"]


def bfloat16_is_fast() -> bool:
    """Whether this CPU has products of bfloat16 matrices that read half the bytes of float32's."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and _has_onednn()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def int4_is_there() -> bool:
    """Whether this PyTorch multiplies by 4-bit weights on this CPU."""
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return platform.machine() in ("x86_64", "AMD64") and all(
        hasattr(torch.ops.aten, name) for name in names
    )


def _has_onednn() -> bool:
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _probe(weight: Tensor, kernel: Kernel) -> bool:
    """Whether rows have the same bits at several widths; asked once per kernel and shape."""
    out, inner = weight.shape
    key = (kernel.name, out, inner, weight.dtype)
    if key not in _exact:
        if weight.device.type != "cpu":
            return _exact.setdefault(key, False)  # not promised there: probing would prove little
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_WIDTHS[-1], inner, generator=generator).to(weight.dtype)
        most = kernel.call(x, None)
        _exact[key] = all(torch.equal(kernel.call(x[:n], None), most[:n]) for n in _WIDTHS[:-1])
    return _exact[key]


def _plain(weight: Tensor) -> Kernel:
    return Kernel("plain", lambda x, bias: F.linear(x, weight, bias))


def _mkl(weight: Tensor) -> Kernel:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _HINT)
    # The operator reads only the shape of the original weights: an expanded zero has it for free.
    shape = torch.zeros(1).expand(weight.shape)
    linear = torch.ops.mkl._mkl_linear.default
    return Kernel(
        "mkl",
        lambda x, bias: linear(x.contiguous(), packed, shape, bias, x.shape[0]),
        packed,
        shape,
    )


def _onednn(weight: Tensor) -> Kernel:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT)
    linear = torch.ops.mkldnn._linear_pointwise.default

    def call(x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows > _HINT:
            x = F.pad(x, (0, 0, 0, -rows % _STEP))
        out: Tensor = linear(x.contiguous(), packed, bias, "none", [], "")
        return out[:rows]

    return Kernel("onednn", call, packed)


def _onednn_pairs(weight: Tensor) -> Kernel:
    """oneDNN sums long rows (over 1,024) otherwise when there is only one: never give it one."""
    kernel = _onednn(weight)

    def linear(x: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] != 1:
            return kernel.call(x, bias)
        return kernel.call(x.expand(2, -1).contiguous(), bias)[:1]

    return Kernel("onednn_pairs", linear, kernel.packed)


def fits_int4(out_features: int, in_features: int) -> bool:
    """Whether the 4-bit kernel takes weights of this shape."""
    return in_features % INT4_GROUP == 0 and out_features % 16 == 0


def round_to_int4(module: nn.Module) -> None:
    """Give the layers inside `module` the weights that "int4" will make of them, in place."""
    for name, child in module.named_modules():
        if type(child) is nn.Linear and not name.endswith("lm_head"):
            weight = child.weight.detach()
            if fits_int4(*weight.shape):
                levels, scale, least = _levels(weight)
                weight.copy_((levels * scale + least).view(weight.shape))


def _levels(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights by groups as levels 0 to 15 (float), a scale and the least value of each group."""
    groups = weight.float().view(weight.shape[0], -1, INT4_GROUP)
    least = groups.amin(-1, keepdim=True)
    scale = ((groups.amax(-1, keepdim=True) - least) / 15).clamp_(min=1e-8)
    return ((groups - least) / scale).round_(), scale, least


def _int4(weight: Tensor) -> Kernel:
    """16 levels between the least and the greatest weight of each group: 5 bits each are read."""
    levels, scale, least = _levels(weight)
    whole = levels.view(weight.shape).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
    zeros = least + 8 * scale  # the kernel takes levels from -8 to 7
    scales = torch.cat([scale, zeros], -1).transpose(0, 1).contiguous().bfloat16()
    linear = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def call(x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = linear(x.contiguous(), packed, INT4_GROUP, scales)
        return out if bias is None else out.add_(bias)

    return Kernel("int4", call, packed, scales)


_KERNELS: dict[str, Callable[[Tensor], Kernel]] = {
    "plain": _plain,
    "mkl": _mkl,
    "onednn": _onednn,
    "onednn_pairs": _onednn_pairs,
}
