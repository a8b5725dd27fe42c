"""The arg-max of an output layer, exactly, for a quarter of the bytes.

At temperature 0 only the best id of a row is wanted, and a small model with a large vocabulary
spends half of its step on the logits of all the others. So they are first bounded with 8-bit
weights, whose integer products are exact and cost the same for one row as for sixteen; the few ids
that could still be the best are then computed from the model's own weights. The bound is a theorem,
not an estimate (Cauchy-Schwarz on the rounding errors), so nothing can be lost: the answer is the
arg-max of the exact products, and does not depend on how many rows a pass has.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from anydraft.errors import NumericsError

log = logging.getLogger(__name__)


class RowSource(Protocol):
    """A matrix, of which rows are read: a Tensor, or a file."""

    def __getitem__(self, ids: Tensor | slice) -> Tensor:
        """(n,) int64, or a slice of n rows in a row -> (n, width)."""


_CHUNK = 1024
"""Rows of weights that are rounded at a time: what the caches hold."""
_ZERO = 128
"""The code of 0: activations are coded from 1 to 255."""
_SLACK = 1e-5
"""Relative to the norms: more than all float32 roundings in the bound's own arithmetic."""
_MANY = 32
"""With one id in this many a candidate, all products are quicker than reading the candidates'."""
_PART = 16384
_ROUNDING = 1e-3
"""Relative to the norms: more than float32 sums over any hidden size in use are off."""
_TINY = 1e-30
"""Products below this may have lost bits to underflow."""
_TIE = 1e-11
"""Relative to the norms: sums in double closer than this are summed again without rounding."""


class ArgmaxHead:
    """Finds the best id of each row of a product with `weight`.

    Args:
        weight: (size, hidden) of any float type, on the CPU; kept, and read where candidates lie.
        whole: the same, for rows with many candidates.
    """

    def __init__(self, weight: RowSource, whole: Tensor) -> None:
        self.weight, self._whole = weight, whole
        size, hidden = whole.shape
        codes = torch.empty((size, hidden), dtype=torch.int8)
        self._scale, self._error = torch.empty(size), torch.empty(size)
        self._norm = 0.0
        for start in range(0, size, _CHUNK):
            part = slice(start, min(size, start + _CHUNK))
            rows = weight[part].float()
            scale = rows.abs().amax(1).clamp_(min=1e-30).div_(127)
            rounded = (rows / scale[:, None]).round_()
            codes[part] = rounded
            self._scale[part] = scale
            self._norm = max(self._norm, float(rows.norm(dim=1).max()))
            left = torch.addcmul(rows, rounded, scale[:, None], value=-1)
            self._error[part] = left.norm(dim=1)
        if not math.isfinite(self._norm):
            raise NumericsError("the output layer's weights hold NaN or infinity")
        self._sample = codes[:64].clone()
        self._zeros = torch.zeros(size, dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self._check()

    def best(self, x: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor:
        """The best id of each row, the lowest one on a tie.

        Args:
            x: (rows, hidden) float32.
            forbidden: per row the ids that are out of the question.

        Returns:
            (rows,) int64.

        Raises:
            NumericsError: NaN or infinity in a row, or every id is forbidden.
        """
        count = x.shape[0]
        norms = x.norm(dim=1)
        if not bool(torch.isfinite(norms).all()):
            raise NumericsError("no token can be chosen: the logits hold NaN or infinity")
        high, high_scale = _coded(x)
        rest = torch.addcmul(x, high, high_scale, value=-1)
        low, low_scale = _coded(rest)
        rest.addcmul_(low, low_scale, value=-1)
        slack = (rest.norm(dim=1) + _SLACK * norms) * self._norm + _TINY
        products = self._products(torch.cat([high, low]))
        best = torch.empty(count, dtype=torch.int64)
        for row in range(count):
            about = products[row].mul_(high_scale[row])
            about.add_(products[count + row], alpha=float(low_scale[row]))
            if len(forbidden[row]):
                about[torch.as_tensor(forbidden[row])] = -torch.inf
            norm = float(norms[row])
            floor = float(torch.add(about, self._error, alpha=-norm).max()) - 2 * float(slack[row])
            if floor == -math.inf:
                raise NumericsError("no token can be chosen: every id is forbidden")
            about.add_(self._error, alpha=norm)
            candidates = np.flatnonzero(about.numpy() >= np.float32(floor))
            best[row] = self._exact_best(x[row], norm, torch.from_numpy(candidates))
        return best

    def _exact_best(self, x: Tensor, norm: float, candidates: Tensor) -> int:
        limit = norm * self._norm
        if len(candidates) * _MANY > len(self._scale):
            candidates = candidates[_nearly_best(self._all(x)[candidates], limit)]
        rows = self.weight[candidates]
        near = _nearly_best(rows.float() @ x, limit)
        candidates, rows = candidates[near], rows[near]
        if len(candidates) == 1:
            return int(candidates[0])
        # A product of two float32 is exact in double; only their sum is rounded.
        wide = x.double()
        sums = rows.double() @ wide
        near = sums >= sums.max() - _TIE * limit
        candidates, rows = candidates[near], rows[near]
        if len(candidates) == 1:
            return int(candidates[0])
        exact = [math.fsum(row) for row in (rows.double() * wide).tolist()]
        return int(candidates[exact.index(max(exact))])

    def _all(self, x: Tensor) -> Tensor:
        """Every product in float32: for a model that is very unsure."""
        return torch.cat([torch.mv(part.float(), x) for part in torch.split(self._whole, _PART)])

    def _products(self, codes: Tensor) -> Tensor:
        """(rows, vocab): whole numbers from -127 to 127, times the rounded weights."""
        products: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            codes.add(_ZERO).to(torch.uint8), 1.0, _ZERO, self._packed, self._scale, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return products

    def _check(self) -> None:
        """Some CPUs' 8-bit products saturate; the bound would then be wrong."""
        inner = self._sample.shape[1]
        rows = torch.full((3, inner), 127.0)
        rows[1] = -127
        rows[2] = torch.where(self._sample[0] < 0, -127.0, 127.0)
        expected = rows.double() @ (self._sample.double() * self._scale[:64, None].double()).T
        got = self._products(rows)[:, :64].double()
        if not torch.allclose(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())):
            raise ArithmeticError("8-bit products are not exact on this CPU")


def _nearly_best(products: Tensor, limit: float) -> Tensor:
    """Which of these float32 products their own rounding leaves in doubt, as a mask."""
    return products >= products.max() - 2 * _ROUNDING * limit


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers from -127 to 127 (float), and the scale of each, (rows, 1)."""
    scale = x.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(127)
    return (x / scale).round_(), scale


def exact_int8_is_there() -> bool:
    """Whether this CPU and this PyTorch multiply 8-bit numbers quickly and exactly."""
    supported: Any = getattr(torch.cpu, "_is_vnni_supported", None)
    return (
        platform.machine() in ("x86_64", "AMD64")
        and supported is not None
        and bool(supported())
        and hasattr(torch.ops.onednn, "qlinear_pointwise")
    )
