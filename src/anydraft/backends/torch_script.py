"""The fused layers without Python between the operations.

One function in TorchScript does what FusedEngine does in Python, operation by operation, so with
the same bits, for the pass that decides speed: few rows of one sequence on a CPU. No compiler is
involved; it keeps the interpreter's code and objects out of the caches between matrix products.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, attr-defined"

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Optional  # TorchScript reads these

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anydraft.backends.torch_attention import Pass
    from anydraft.backends.torch_fused import FusedEngine

log = logging.getLogger(__name__)

KERNELS = ("mkl", "onednn", "int4")
"""Numbers for `linear`."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
"""Numbers for `activate`."""


def linear(x: Tensor, packed: Tensor, shape: Tensor, bias: Optional[Tensor], kernel: int) -> Tensor:  # noqa: UP045
    """PackedLinear's kernel of this number in KERNELS."""
    if kernel == 0:
        return torch.ops.mkl._mkl_linear(x.contiguous(), packed, shape, bias, x.size(0))
    if kernel == 1:
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, 32, shape)
    if bias is not None:
        out = out + bias
    return out


def activate(x: Tensor, kind: int) -> Tensor:
    """`kind` is one of ACTIVATIONS."""
    if kind == 0:
        return torch.ops.aten.silu(x)
    if kind == 1:
        return torch.ops.aten.gelu(x)
    return torch.ops.aten.gelu(x, approximate="tanh")


def layers(
    x: Tensor,
    packed: list[Tensor],
    shapes: list[Tensor],
    biases: list[Optional[Tensor]],  # noqa: UP045
    gains: list[Tensor],
    head_gains: list[Tensor],
    after_gains: list[Tensor],
    cosines: list[Tensor],
    sines: list[Tensor],
    new: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    masks: list[Tensor],
    scales: list[float],
    both_signs: Tensor,
    queries: int,
    heads: int,
    dim: int,
    eps: float,
    activation: int,
    kernel: int,
) -> Tensor:
    """x is (rows, 2 * hidden) and is changed; lists are per layer, or two or four per layer."""
    count = x.size(0)
    double = [x.size(1)]
    hidden = x.size(1) // 2
    split = x.view(count, 2, hidden)
    for i in range(len(scales)):
        a = 4 * i
        h = torch.layer_norm(x, double, gains[2 * i], None, eps)[:, :hidden]
        qkv = linear(h, packed[a], shapes[a], biases[a], kernel).view(
            count, queries + 2 * heads, dim
        )
        qk = qkv[:, : queries + heads]
        if len(head_gains) > 0:
            doubled = (qk.unsqueeze(2) * both_signs).flatten(2)
            normed = torch.layer_norm(doubled, [2 * dim], None, None, eps)
            torch.mul(normed[..., :dim], head_gains[i], out=qk)
        halves = qk.unflatten(2, [2, dim // 2])
        swapped = halves.flip(2)
        qk.mul_(cosines[i])
        halves.addcmul_(swapped, sines[i])
        new[i].copy_(qkv[:, queries:])
        query = qkv[:, :queries].view(count, heads, queries // heads, dim)
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys[i], values[i], 0.0, False, attn_mask=masks[i], scale=scales[i]
        )[0]
        h = linear(
            out.reshape(count, queries * dim), packed[a + 1], shapes[a + 1], biases[a + 1], kernel
        )
        if len(after_gains) > 0:
            h = (h.unsqueeze(1) * both_signs).view(count, 2 * hidden)
            x.add_(torch.layer_norm(h, double, after_gains[2 * i], None, eps))
        else:
            split.addcmul_(h.unsqueeze(1), both_signs)
        h = torch.layer_norm(x, double, gains[2 * i + 1], None, eps)[:, :hidden]
        both = linear(h, packed[a + 2], shapes[a + 2], biases[a + 2], kernel)
        inner = both.size(1) // 2
        h = activate(both[:, :inner], activation).mul_(both[:, inner:])
        h = linear(h, packed[a + 3], shapes[a + 3], biases[a + 3], kernel)
        if len(after_gains) > 0:
            h = (h.unsqueeze(1) * both_signs).view(count, 2 * hidden)
            x.add_(torch.layer_norm(h, double, after_gains[2 * i + 1], None, eps))
        else:
            split.addcmul_(h.unsqueeze(1), both_signs)
    return x


class ScriptedLayers:
    """The layers of a FusedEngine, as `layers` takes them."""

    def __init__(self, function: Any, engine: FusedEngine) -> None:
        self._function = function
        inner = [m for layer in engine.layers for m in layer.linears]
        self._kernel = KERNELS.index(inner[0].kernel.name)
        none = torch.zeros(1)
        self._weights = (
            [m.kernel.packed for m in inner],
            [none if m.kernel.shape is None else m.kernel.shape for m in inner],
            [m.bias for m in inner],
            [gain for layer in engine.layers for gain in (layer.input_gain, layer.before_mlp)],
            [layer.head_gain for layer in engine.layers if layer.head_gain is not None],
            [
                g
                for layer in engine.layers
                for g in (layer.after_attention, layer.after_mlp)
                if g is not None
            ],
        )
        self._activation = ACTIVATIONS[engine.activation]
        self._scales = [layer.scale for layer in engine.layers]

    def run(
        self,
        e: FusedEngine,
        x: Tensor,
        current: Pass,
        ropes: dict[str, tuple[Tensor, Tensor]],
    ) -> Tensor | None:
        """What `layers` makes of x; None, with x unchanged, if this pass is not for it.

        `e` is the engine that this was made from.
        """
        segment = current.segments[0]
        if len(current.segments) > 1 or not segment.by_row:
            return None
        groups = {window: current.groups(window) for window in {layer.window for layer in e.layers}}
        if any(len(found) > 1 for found in groups.values()):
            return None
        alone = {window: found[0] for window, found in groups.items()}
        views = [alone[layer.window].views(i, segment.rows) for i, layer in enumerate(e.layers)]
        with torch.jit.optimized_execution(False):
            out: Tensor = self._function(
                x,
                *self._weights,
                [ropes[layer.rope][0] for layer in e.layers],
                [ropes[layer.rope][1] for layer in e.layers],
                list(segment.cache.joined(segment.start, segment.end)),
                [keys for keys, _ in views],
                [values for _, values in views],
                [alone[layer.window].wide for layer in e.layers],
                self._scales,
                e.both_signs,
                e.query_heads,
                e.key_heads,
                e.dim,
                e.eps,
                self._activation,
                self._kernel,
            )
        return out


def scripted(engine: FusedEngine) -> ScriptedLayers | None:
    """None where these layers, this device or this PyTorch have no use for it."""
    names = {m.kernel.name for layer in engine.layers for m in layer.linears}
    if engine.device.type != "cpu" or len(names) > 1 or not names <= set(KERNELS):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, with no successor but compilers
            return ScriptedLayers(torch.jit.script(layers), engine)
    except Exception as error:  # whatever is missing, the same operations run from Python
        log.debug("the layers run from Python: %s", error)
        return None
