"""A short pass for the common decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma 3.

A small model loses much of a step outside its matrix products. This is the same arithmetic as the
stock modules in about eighteen operations a layer: q, k and v from one product, gate and up from
one, norms as single operations, keys and values written at once. It is compared with the stock
modules when a model loads.

Every operation counts: after a matrix product has streamed its weights, the caches hold none of
the code and data of the next small operation. An RMS norm is half a dozen of them in PyTorch; a
layer norm is one, and of a vector beside its negative it is the RMS norm (the mean is zero, the
variance the mean square). So the residual stream is kept as (x, -x).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anydraft.backends.torch_argmax import ArgmaxHead, RowSource, exact_int8_is_there
from anydraft.backends.torch_attention import Pass, Segment
from anydraft.backends.torch_cache import LayerShape, SequenceCache
from anydraft.backends.torch_pack import PackedLinear, trim_memory
from anydraft.backends.torch_script import scripted

FAMILIES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
}
_STATIC_ROPES = {"default", "linear", "llama3", "yarn"}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


log = logging.getLogger(__name__)


class NotFusable(Exception):
    """The fused pass does not cover this model; the message says why."""


@dataclass(slots=True)
class _Layer:
    """One decoder layer. Gains are final (Gemma's hold the 1), and doubled for (x, -x)."""

    input_gain: Tensor
    qkv: PackedLinear
    head_gain: Tensor | None
    """(query heads + key heads, dim), or None without query and key norms."""
    out: PackedLinear
    after_attention: Tensor | None
    before_mlp: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    after_mlp: Tensor | None
    rope: str
    window: int | None
    scale: float

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """In the order in which they run."""
        return self.qkv, self.out, self.gate_up, self.down


class _Rope:
    """Cosines and sines by position, from the stock module, grown as positions come."""

    def __init__(self, rotary: nn.Module, layer_type: str | None, like: Tensor) -> None:
        self._rotary = rotary
        self._arguments = () if layer_type is None else (layer_type,)
        self._like = like
        self.cos = self.sin = like.new_empty(0)
        self.size = 0

    def rows(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """(rows, 1, dim) cosines, and (rows, 1, 2, dim / 2) sines, the first half negative."""
        if highest >= self.size:
            self._grow(highest + 1)
        return self.cos[positions], self.sin[positions]

    def _grow(self, least: int) -> None:
        size = max(1024, self.size * 2)
        while size < least:
            size *= 2
        positions = torch.arange(size, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions, *self._arguments)
        half = sin[0, :, : sin.shape[-1] // 2]
        self.cos, self.sin = cos[0][:, None], torch.stack([-half, half], dim=1)[:, None]
        self.size = size


class FusedEngine:
    """See the module."""

    kind = "fused"

    def __init__(
        self,
        model: nn.Module,
        limit: int | None,
        *,
        consume: bool = False,
        embedding: tuple[Tensor, RowSource] | None = None,
        int4: bool = False,
    ) -> None:
        """Take over the weights of `model`.

        Args:
            consume: `model` is ours: free its layers as they are packed. It cannot run afterwards.
            embedding: see `mapped_embedding`: to use instead of its own.
            int4: round the layers' weights to 4 bits (not the output layer's).

        Raises:
            NotFusable: before anything was freed.
        """
        self.limit = limit
        self.int4 = int4
        self.first_ids: int | None = None
        """Logits of the first so many ids only, without packing the output layer for it."""
        check_fusable(model)
        stock: Any = model
        config = stock.config
        self.dtype: torch.dtype = stock.dtype
        self.device: torch.device = stock.device
        self.gemma = type(model).__name__.startswith("Gemma")
        self.eps: float = config.rms_norm_eps
        self.activation = _activation(config)
        self.act = _ACTIVATIONS[self.activation]
        self.hidden: int = config.hidden_size
        self.query_heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.dim: int = stock.model.layers[0].self_attn.head_dim
        self.half = self.dim // 2
        self.both_signs = torch.tensor([[1.0], [-1.0]], dtype=self.dtype, device=self.device)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        own: Tensor = stock.model.embed_tokens.weight.detach()
        self.embedding, rows = (own, own) if embedding is None else embedding
        scale = getattr(stock.model.embed_tokens, "embed_scale", None)
        self.embed_signs = self.both_signs * (1.0 if scale is None else scale.to(self.dtype))
        self.norm = self._doubled_gain(stock.model.norm)
        self.ropes = self._read_ropes(stock.model, config)
        self.shapes = [LayerShape(self.key_heads, self.dim, self.dim)] * config.num_hidden_layers
        self.layers: list[_Layer] = []
        self._take_head(stock.lm_head, own, rows)
        for index in range(config.num_hidden_layers):
            self.layers.append(self._read_layer(stock.model.layers[index], config))
            if consume:
                stock.model.layers[index] = nn.Identity()
        self.script = scripted(self)

    def _take_head(self, head: Any, embedding: Tensor, rows: RowSource) -> None:
        """Pack the output layer; later, and as a request needs it, if it is the embedding again."""
        self.kept: Tensor | None = None  # the ids that have logits, if not all
        self._head: PackedLinear | None = None
        self._argmax: ArgmaxHead | None = None
        self._rows = rows
        self.tied = head.bias is None and head.weight.data_ptr() == embedding.data_ptr()
        self.finds_argmax = (
            self.tied
            and self.softcap is None
            and self.dtype == torch.float32
            and self.device.type == "cpu"
            and exact_int8_is_there()
        )
        if not self.finds_argmax:
            self._head = PackedLinear(head.weight, head.bias)

    @property
    def head(self) -> PackedLinear:
        """The output layer, for requests that need all logits."""
        if self._head is None:
            self._head = PackedLinear(self._rows[: self.embedding.shape[0]].to(self.dtype))
            trim_memory()
        return self._head

    def best(self, x: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor | None:
        """See ArgmaxHead.best. None, and `finds_argmax` is over, if this CPU turns out unfit."""
        if self._argmax is None:
            try:
                self._argmax = ArgmaxHead(self._rows, self.embedding)
            except (RuntimeError, ArithmeticError) as error:
                log.warning("arg-maxes come from all logits: %s", error)
                self.finds_argmax = False
                return None
        return self._argmax.best(x, forbidden)

    @property
    def linears(self) -> list[PackedLinear]:
        """Every packed layer but the output layer."""
        return [m for layer in self.layers for m in layer.linears]

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.shapes, self.dtype, self.device, self.limit)

    def run(
        self, segments: Sequence[Segment], ids: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        return self.logits(self.rows(segments, ids, positions, keep))

    def rows(
        self, segments: Sequence[Segment], ids: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        """(len(keep), hidden): what the output layer is given."""
        with torch.inference_mode():
            x = self._layers_over(Pass(list(segments), self.dtype, self.device), ids, positions)
            if keep.shape[0] != x.shape[0]:
                x = x[keep]
            x = torch.layer_norm(x, (2 * self.hidden,), self.norm, None, self.eps)
            return x[:, : self.hidden].contiguous()

    def logits(self, x: Tensor) -> Tensor:
        """(n, hidden) -> (n, vocab) float32; fewer ids while `first_ids` says so."""
        # The caller may modify logits, so they are made outside inference mode.
        if x.shape[0] == 0:
            return torch.empty((0, self.embedding.shape[0]), device=self.device)
        if self.first_ids is not None:  # row by row: unpacked products depend on the width
            some = self.embedding[: self.first_ids].to(self.dtype)
            return torch.cat([F.linear(row, some) for row in torch.split(x, 1)]).float()
        logits: Tensor = self.head(x).float()
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.kept is not None:
            wide = logits.new_full((logits.shape[0], self.embedding.shape[0]), -torch.inf)
            wide[:, self.kept] = logits
            return wide
        return logits

    def keep_outputs(self, ids: Tensor) -> bool:
        """Compute logits of these ids alone from now on; the others are -inf.

        False, and nothing changes, where the output layer's weights are not the embedding's: they
        are packed, and cannot be taken apart.
        """
        if not self.tied:
            return False
        self.kept, self.finds_argmax = ids.to(self.device), False
        self._head = PackedLinear(self.embedding[ids.to(self.embedding.device)].to(self.dtype))
        return True

    def _layers_over(self, current: Pass, ids: Tensor, positions: Tensor) -> Tensor:
        """(rows, 2 * hidden): what the layers make of the ids, beside its negative."""
        count, doubled = ids.shape[0], (2 * self.hidden,)
        highest = max(s.end for s in current.segments) - 1
        ropes = {name: rope.rows(positions, highest) for name, rope in self.ropes.items()}
        embedded = torch.embedding(self.embedding, ids).to(self.dtype)
        x = (embedded.unsqueeze(1) * self.embed_signs).view(count, -1)
        if (
            self.script is not None
            and (out := self.script.run(self, x, current, ropes)) is not None
        ):
            return out
        split = x.view(count, 2, self.hidden)
        for index, layer in enumerate(self.layers):
            h = torch.layer_norm(x, doubled, layer.input_gain, None, self.eps)
            h = self._attention(current, index, layer, h[:, : self.hidden], *ropes[layer.rope])
            self._add(x, split, h, layer.after_attention)
            h = torch.layer_norm(x, doubled, layer.before_mlp, None, self.eps)
            gate, up = layer.gate_up(h[:, : self.hidden]).chunk(2, 1)
            self._add(x, split, layer.down(self.act(gate).mul_(up)), layer.after_mlp)
        return x

    def _add(self, x: Tensor, split: Tensor, h: Tensor, gain: Tensor | None) -> None:
        """x += h, or its norm, in both signs. `split` is x as (rows, 2, hidden)."""
        if gain is None:
            split.addcmul_(h.unsqueeze(1), self.both_signs)
            return
        h = (h.unsqueeze(1) * self.both_signs).view(x.shape)
        x.add_(torch.layer_norm(h, (2 * self.hidden,), gain, None, self.eps))

    def _attention(
        self, current: Pass, index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        count, queries = h.shape[0], self.query_heads
        qkv = layer.qkv(h).view(count, queries + 2 * self.key_heads, self.dim)
        qk = qkv[:, : queries + self.key_heads]
        if layer.head_gain is not None:
            doubled = (qk.unsqueeze(2) * self.both_signs).flatten(2)
            normed = torch.layer_norm(doubled, (2 * self.dim,), None, None, self.eps)
            torch.mul(normed[..., : self.dim], layer.head_gain, out=qk)
        halves = qk.unflatten(2, (2, self.half))
        swapped = halves.flip(2)
        qk.mul_(cos)
        halves.addcmul_(swapped, sin)
        query, both = qkv.split_with_sizes((queries, 2 * self.key_heads), 1)
        current.write_joined(index, both)
        heads = current.attend(index, query, scale=layer.scale, window=layer.window)
        out: Tensor = layer.out(heads.view(count, -1))
        return out

    def _gain(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        return (1.0 + weight.float()).to(self.dtype) if self.gemma else weight

    def _doubled_gain(self, norm: Any) -> Tensor:
        return self._gain(norm).repeat(2)

    def _read_layer(self, stock: Any, config: Any) -> _Layer:
        attention, mlp = stock.self_attn, stock.mlp
        head_gain = None
        if hasattr(attention, "q_norm"):
            head_gain = torch.cat(
                [
                    self._gain(attention.q_norm).expand(self.query_heads, -1),
                    self._gain(attention.k_norm).expand(self.key_heads, -1),
                ]
            )
        if type(stock).__name__.startswith("Mistral"):
            window = config.sliding_window
        else:
            window = getattr(attention, "sliding_window", None)
        return _Layer(
            input_gain=self._doubled_gain(stock.input_layernorm),
            qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj, int4=self.int4),
            head_gain=head_gain,
            out=_join(attention.o_proj, int4=self.int4),
            after_attention=self._doubled_gain(stock.post_attention_layernorm)
            if self.gemma
            else None,
            before_mlp=self._doubled_gain(
                stock.pre_feedforward_layernorm if self.gemma else stock.post_attention_layernorm
            ),
            gate_up=_join(mlp.gate_proj, mlp.up_proj, int4=self.int4),
            down=_join(mlp.down_proj, int4=self.int4),
            after_mlp=self._doubled_gain(stock.post_feedforward_layernorm) if self.gemma else None,
            rope=attention.layer_type if self.gemma else "",
            window=window,
            scale=attention.scaling,
        )

    def _read_ropes(self, stock: Any, config: Any) -> dict[str, _Rope]:
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        if self.gemma:
            return {kind: _Rope(stock.rotary_emb, kind, like) for kind in set(config.layer_types)}
        return {"": _Rope(stock.rotary_emb, None, like)}


def check_fusable(model: nn.Module) -> None:
    """Raises NotFusable unless every part of `model` is one that the fused pass knows."""
    stock: Any = model
    name = type(model).__name__
    if name not in FAMILIES:
        raise NotFusable(f"no fused pass for {name}")
    config = stock.config
    if _activation(config) not in _ACTIVATIONS:
        raise NotFusable(f"activation {_activation(config)}")
    ropes = stock.model.rotary_emb.rope_type
    if unknown := set(ropes.values() if isinstance(ropes, dict) else [ropes]) - _STATIC_ROPES:
        raise NotFusable(f"rope of type {', '.join(sorted(unknown))}")
    if getattr(config, "use_bidirectional_attention", False):
        raise NotFusable("attention in both directions")
    for module_name, module in stock.named_modules():
        if hasattr(module, "_hf_hook"):
            raise NotFusable(f"{module_name or name} is hooked (offloaded or spread over devices)")
        last = module_name.rsplit(".", 1)[-1]
        if (last.endswith("_proj") or last == "lm_head") and type(module) is not nn.Linear:
            raise NotFusable(f"{module_name} is a {type(module).__name__}")
    first = stock.model.layers[0].self_attn
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if first.head_dim % 2 or partial != 1.0:
        raise NotFusable("heads that are rotated in part")


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _join(*linears: Any, int4: bool) -> PackedLinear:
    """One layer whose outputs are those of `linears`, side by side."""
    if len(linears) == 1:
        return PackedLinear(linears[0].weight, linears[0].bias, int4=int4)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return PackedLinear(weight, int4=int4)
    biases = [
        weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return PackedLinear(weight, torch.cat(biases), int4=int4)
