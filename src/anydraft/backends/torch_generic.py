"""Engines that run a model's own modules: over our cache in one ragged pass, or state by state.

`ModuleEngine` calls the stock forward on all segments' rows at once, with our cache and attention
in place of transformers'. `StockEngine` is for models that do not take them: one call per state,
with a stock cache that keeps every position.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anydraft.backends.torch_attention import Pass, Segment
from anydraft.backends.torch_cache import LayerShape, SequenceCache

ATTENTION = "anydraft"
"""Our attention function's name in transformers. No mask function has it, so no mask is built."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class StateCache(Protocol):
    """What an engine keeps of one sequence."""

    def reserve(self, length: int) -> None: ...
    def cut(self, length: int, used: int) -> None: ...
    def free(self) -> None: ...


class Engine(Protocol):
    """Runs passes. `kind` is for messages: "fused", "modules" or "stock"."""

    kind: str

    def new_cache(self) -> StateCache: ...

    def run(
        self, segments: Sequence[Segment], ids: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        """Logits (len(keep), vocab) of the rows `keep` of a pass; keys and values go to the caches.

        Args:
            ids, positions: (rows,) int64, the segments' rows in order.
            keep: (n,) int64 indices of rows; may be empty.
        """


class UnfitModel(Exception):
    """The stock modules do not behave as an engine assumes; the message says how."""


_running = threading.local()


class _PassCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Writes a layer's keys and values into the segments' own caches; says which layer is on."""

    def __init__(self, current: Pass | _Recorder) -> None:
        super().__init__(layers=[])
        self.current = current
        self.layer = -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes (1, heads, rows, dim)."""
        self.layer = layer_idx
        self.current.write(
            layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return 0  # positions are always given; no mask is built from this


class _Recorder:
    """Stands in for a Pass on the first, tiny run: learns each layer's shapes and window."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.shapes[layer] = LayerShape(keys.shape[1], keys.shape[2], values.shape[2])

    def attend(self, layer: int, queries: Tensor, *, window: int | None, **_: Any) -> Tensor:
        self.windows[layer] = window
        return queries.new_zeros(*queries.shape[:2], self.shapes[layer].value_dim)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered with transformers: (1, heads, rows, dim) queries, the rest from the pass."""
    cache: _PassCache = _running.cache
    if kwargs.get("position_bias") is not None:
        raise UnfitModel("its attention adds a position bias")
    out = cache.current.attend(
        cache.layer,
        query[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


class ModuleEngine:
    """The stock modules, with our cache and our attention."""

    kind = "modules"

    def __init__(self, model: nn.Module, limit: int | None) -> None:
        """`model` is ours alone: its attention is switched over here.

        Raises:
            UnfitModel: its attention cannot be replaced, or does not act as its config says.
        """
        self.model: Any = model
        self.limit = limit
        self.dtype, self.device = _placement(self.model)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation_internal = ATTENTION
        self._cache_name = _cache_argument(model)
        self._keeps = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self.shapes = self._layers()

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.shapes, self.dtype, self.device, self.limit)

    def run(
        self, segments: Sequence[Segment], ids: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        return self._forward(Pass(list(segments), self.dtype, self.device), ids, positions, keep)

    def _forward(
        self, current: Pass | _Recorder, ids: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        cache = _PassCache(current)
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self._keeps:
            arguments["logits_to_keep"] = keep
        _running.cache = cache
        try:
            out = self.model(input_ids=ids[None], position_ids=positions[None], **arguments)
        finally:
            _running.cache = None
        logits: Tensor = out.logits[0] if self._keeps else out.logits[0][keep]
        return logits.float()

    def _layers(self) -> list[LayerShape]:
        recorder = _Recorder()
        ids = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._forward(recorder, ids, torch.arange(2, device=self.device), ids[:1])
        config = self.model.config.get_text_config()
        count = len(recorder.shapes)
        if sorted(recorder.shapes) != list(range(count)) or count != config.num_hidden_layers:
            raise UnfitModel(f"{count} of {config.num_hidden_layers} layers use the cache")
        if sorted(recorder.windows) != list(range(count)):
            raise UnfitModel("some layers do not use the attention interface")
        for layer, expected in enumerate(_windows(config)):
            if recorder.windows[layer] != expected:
                raise UnfitModel(
                    f"layer {layer} asks for a window of {recorder.windows[layer]}, "
                    f"its config says {expected}"
                )
        return [recorder.shapes[layer] for layer in range(count)]


def _windows(config: Any) -> list[int | None]:
    """The window of each layer, as the config has it."""
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if kinds is None:
        return [window] * count
    if unknown := set(kinds) - _KNOWN_LAYERS:
        raise UnfitModel(f"layers of kind {', '.join(sorted(unknown))}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


class StockCache:
    """A transformers cache that keeps every position of every layer."""

    def __init__(self) -> None:
        self.stock = DynamicCache()

    def reserve(self, length: int) -> None:
        """Nothing to reserve: it grows as it is written."""

    def cut(self, length: int, used: int) -> None:
        extra = self.stock.get_seq_length() - length
        if length == 0:
            self.stock = DynamicCache()
        elif extra > 0:
            self.stock.crop(-extra)  # negative: how many to remove

    def free(self) -> None:
        self.stock = DynamicCache()


class StockEngine:
    """One stock forward per state. Slower, but assumes nothing about the model's attention."""

    kind = "stock"

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._cache_name = _cache_argument(model)
        accepted = inspect.signature(self.model.forward).parameters
        self._positions = "position_ids" in accepted
        self.dtype, self.device = _placement(self.model)

    def new_cache(self) -> StockCache:
        return StockCache()

    def run(
        self, segments: Sequence[Segment], ids: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        parts = []
        for s in segments:
            cache: Any = s.cache
            cache.cut(s.start, s.start)  # a pass that failed may have left more
            rows = slice(s.first, s.first + s.rows)
            arguments: dict[str, Any] = {self._cache_name: cache.stock, "use_cache": True}
            if self._positions:
                arguments["position_ids"] = positions[rows][None]
            out = self.model(input_ids=ids[rows][None], **arguments)
            parts.append(out.logits[0])
        return torch.cat(parts)[keep].float()


def _placement(model: Any) -> tuple[torch.dtype, torch.device]:
    return model.dtype, model.device


def _cache_argument(model: nn.Module) -> str:
    """transformers 5.24 calls it `cache`; remote code and older models `past_key_values`."""
    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def shell(model: nn.Module) -> nn.Module:
    """A copy of modules and config around the same weights: altering it leaves `model` alone."""
    shared: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shared[id(tensor)] = tensor
    return copy.deepcopy(model, shared)
