"""Any causal language model that transformers loads, as a LanguageModel.

    model = load("gemma3-270m")                     # folder, .gguf file, pulled name or hub id
    model = from_objects(hf_model, tokenizer)       # already in memory; left as it is

A pass runs the new tokens of any number of states without padding. Of three ways of running it the
first that fits is taken, and compared at load with the model's own forward on random ids: `fused`
(common families), `modules` (the model's own modules over our cache), `stock` (one stock call per
state).
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anydraft.backends import torch_loading as loading
from anydraft.backends.torch_argmax import RowSource
from anydraft.backends.torch_fused import FusedEngine, NotFusable
from anydraft.backends.torch_generic import Engine, ModuleEngine, StockEngine, UnfitModel, shell
from anydraft.backends.torch_pack import (
    PackedLinear,
    int4_is_there,
    pack_modules,
    round_to_int4,
    trim_memory,
)
from anydraft.backends.torch_plan import LengthRope, Piece, cut_pieces, group_passes, segments_of
from anydraft.errors import ModelError, RollbackError, StateError, UnsupportedModelError
from anydraft.model import checked_states

if TYPE_CHECKING:
    from anydraft.model import Extension
    from anydraft.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_DTYPE = {"cuda": torch.bfloat16, "mps": torch.float16}
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference from the stock logits, relative to the largest of them."""
_ARGMAX_ROWS = 8
"""Rows whose arg-maxes are found at once; bounds the memory of their products."""
_FIRST_IDS = 8192
"""Of an output layer that is not packed yet, the logits of so many ids are compared at load."""
_CHECKED = 24
"""Random ids that the check at load runs over."""


class TorchState:
    """One sequence in a TorchModel."""

    def __init__(self, owner: TorchModel) -> None:
        self.owner = owner
        self.cache = owner.engine.new_cache()
        self.closed = False
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def rollback(self, length: int) -> None:
        if self.closed:
            raise StateError("this state is closed")
        if not 0 <= length <= self._length:
            raise RollbackError(f"cannot roll back to {length}: the state holds {self._length}")
        used, self._length = self._length, length
        self.cache.cut(length, used)

    def close(self) -> None:
        self.closed = True
        self._length = 0
        self.cache.free()


class TorchModel:
    """See the module. Safe to use from several threads: passes take turns."""

    runtime = "torch_hf"

    def __init__(
        self, engine: Engine, vocab_size: int, max_length: int | None, rope: LengthRope, name: str
    ) -> None:
        self.engine: Any = engine
        self.name = name
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.vocabulary: Vocabulary
        self.closed = False
        self._rope = rope
        self._width_exact = False
        self._lock = threading.RLock()
        self._most_rows = 256 if self.dtype == torch.float32 else 32

    @property
    def device(self) -> torch.device:
        device: torch.device = self.engine.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.engine.dtype
        return dtype

    @property
    def width_exact(self) -> bool:
        """Whether a row's logits have the same bits at any number of rows in a pass (up to 32).

        True where every linear layer runs on a kernel that was seen to be so, and the whole model
        at load too; then a target draws the same tokens with a draft as without it, near-ties
        included.
        """
        return self._width_exact and all(m.width_exact for m in self._linears())

    def _note_widths(self, narrow: Tensor, wide: Tensor) -> None:
        """Same rows computed one by one and several at once: do their bits agree?"""
        layers = self._linears(head=False)
        self._width_exact = (
            bool(layers) and all(m.width_exact for m in layers) and torch.equal(narrow, wide)
        )

    def new_state(self) -> TorchState:
        if self.closed:
            raise StateError(f"{self.name} was closed")
        return TorchState(self)

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        return self.extend_greedy(batch, [None] * len(batch))

    @torch.no_grad()
    def extend_greedy(
        self, batch: Sequence[Extension], forbidden: Sequence[Sequence[int] | None]
    ) -> list[Tensor]:
        with self._lock:
            states = checked_states(self, batch, TorchState)
            before = [state.length for state in states]
            try:
                return self._extend(states, batch, forbidden)
            except BaseException:  # an interrupt too: no length changes, no half-written tail stays
                for state, length, (_, ids, _) in zip(states, before, batch, strict=True):
                    state._length = length
                    if not state.closed:
                        state.cache.cut(length, length + len(ids))
                raise

    def keep_outputs(self, token_ids: Sequence[int]) -> bool:
        """Spare the output layer's work for all other ids; their logits are -inf from now on.

        For drafts, which may leave tokens out. False, and nothing changes, where the layer cannot
        be cut.
        """
        with self._lock:
            if not isinstance(self.engine, FusedEngine):
                return False
            return self.engine.keep_outputs(torch.tensor(token_ids, dtype=torch.long))

    def close(self) -> None:
        """Free the weights; states of this model are of no further use."""
        with self._lock:
            self.closed = True
            self.engine = _Closed(self.device, self.dtype)
        trim_memory()

    def _extend(
        self,
        states: list[TorchState],
        batch: Sequence[Extension],
        forbidden: Sequence[Sequence[int] | None],
    ) -> list[Tensor]:
        pieces: list[list[Piece]] = []
        for index, (state, (_, ids, num_logits)) in enumerate(zip(states, batch, strict=True)):
            state.cache.reserve(state.length + len(ids))
            pieces.append(
                cut_pieces(index, state.length, len(ids), num_logits, self._most_rows, self._rope)
            )
        found: list[list[Tensor]] = [[] for _ in batch]
        for group in group_passes(pieces, self._most_rows, self._rope):
            self._rope.prepare()
            self._run(group, states, batch, found)
        results = self._outputs(found, forbidden)
        for state, (_, ids, _) in zip(states, batch, strict=True):
            state._length += len(ids)
        return results

    def _run(
        self,
        group: list[Piece],
        states: list[TorchState],
        batch: Sequence[Extension],
        found: list[list[Tensor]],
    ) -> None:
        """One pass; appends each piece's logits, or what they are made of, to `found`."""
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        for piece in group:
            length = states[piece.index].length
            ids += batch[piece.index][1][piece.start - length : piece.end - length]
            positions += range(piece.start, piece.end)
            keep += range(len(ids) - piece.num_logits, len(ids))
        segments = segments_of(group, [state.cache for state in states])
        tensors = [
            torch.tensor(x, dtype=torch.int64, device=self.device) for x in (ids, positions, keep)
        ]
        run = self.engine.rows if isinstance(self.engine, FusedEngine) else self.engine.run
        rows = run(segments, *tensors)
        first = 0
        for piece in group:
            if piece.num_logits:
                found[piece.index].append(rows[first : first + piece.num_logits])
                first += piece.num_logits

    def _outputs(
        self, found: list[list[Tensor]], forbidden: Sequence[Sequence[int] | None]
    ) -> list[Tensor]:
        """Logits of each extension, or its arg-maxes where `forbidden` is not None."""
        counts = [sum(len(part) for part in parts) for parts in found]
        flat = [part for parts in found for part in parts]
        if not isinstance(self.engine, FusedEngine):
            rows = torch.cat(flat) if flat else torch.empty((0, self.vocab_size))
            return list(torch.split(rows.to(self.device), counts))
        engine = self.engine
        hidden = torch.cat(flat) if flat else torch.empty((0, engine.hidden), device=self.device)
        rows_of = torch.split(hidden, counts)
        quick = [engine.finds_argmax and banned is not None for banned in forbidden]
        results: list[Tensor] = [torch.empty(0)] * len(counts)
        for wanted, compute in ((True, self._best), (False, self._logits)):
            chosen = [i for i, is_quick in enumerate(quick) if is_quick == wanted]
            if chosen:
                outputs = compute(engine, [(rows_of[i], forbidden[i] or ()) for i in chosen])
                for i, output in zip(chosen, outputs, strict=True):
                    results[i] = output
        return results

    def _logits(
        self, engine: FusedEngine, wanted: list[tuple[Tensor, Sequence[int]]]
    ) -> list[Tensor]:
        rows = torch.cat([hidden for hidden, _ in wanted])
        parts = [engine.logits(part) for part in torch.split(rows, self._most_rows)] or [rows]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return list(torch.split(logits, [len(hidden) for hidden, _ in wanted]))

    def _best(
        self, engine: FusedEngine, wanted: list[tuple[Tensor, Sequence[int]]]
    ) -> list[Tensor]:
        rows = torch.cat([hidden for hidden, _ in wanted])
        banned = [ids for hidden, ids in wanted for _ in range(len(hidden))]
        parts: list[Tensor] = []
        for i in range(0, len(rows), _ARGMAX_ROWS):
            best = engine.best(rows[i : i + _ARGMAX_ROWS], banned[i : i + _ARGMAX_ROWS])
            if best is None:
                return self._logits(engine, wanted)
            parts.append(best)
        ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return list(torch.split(ids, [len(hidden) for hidden, _ in wanted]))

    def _linears(self, *, head: bool = True) -> list[PackedLinear]:
        if isinstance(self.engine, FusedEngine):
            return [*self.engine.linears, self.engine.head] if head else self.engine.linears
        if isinstance(self.engine, ModuleEngine):
            return [m for m in self.engine.model.modules() if isinstance(m, PackedLinear)]
        return []


class _Closed:
    """What is left of a closed model's engine."""

    kind = "closed"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype


def load(
    spec: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    context_length: int | None = None,
    engine: str | None = None,
    role: str = "target",
) -> TorchModel:
    """Open a model with transformers.

    Args:
        spec: a folder, a .gguf file, a pulled name or a hub id.
        device: "cpu", "cuda", "cuda:1", "mps"; None: CUDA or MPS where there is one.
        dtype: "float32", "bfloat16", "float16", or "int4" (x86 CPUs: the layers' weights rounded to
            4 bits, activations in bfloat16); None: float32 on CPU, bfloat16 on CUDA, float16 on
            MPS; for a draft on a CPU the quickest that it has.
        threads: CPU threads, for the whole process; None leaves PyTorch's choice.
        trust_remote_code: run code that comes with the model.
        context_length: a limit below the model's own.
        engine: "fused", "modules" or "stock"; None: the first that fits.
        role: "target" or "draft": what the model is for; only defaults depend on it.

    Raises:
        ModelNotFoundError, ModelFileError, UnsupportedModelError, VocabularyError: in words.
    """
    source = loading.locate(spec)
    where = _device(device)
    kind, int4 = _dtype(dtype, where, role)
    if threads is not None:
        torch.set_num_threads(threads)
    config = loading.read_config(source, trust_remote_code)
    loading.refuse_unfit(config, source.name)
    tokenizer = loading.read_tokenizer(source, trust_remote_code)
    gc.collect()
    trim_memory()  # parsing a tokenizer leaves hundreds of megabytes behind, now still in one piece

    def read() -> Any:
        found = loading.read_model(source, config, kind, trust_remote_code).to(where)
        if int4:
            round_to_int4(found)
        return found

    stock = read()
    eos = loading.eos_ids(stock)
    embedding = loading.mapped_embedding(source, stock) if where.type == "cpu" else None
    model = _build(stock, read, context_length, source.name, engine, embedding, int4)
    del stock
    model.vocabulary = _vocabulary(tokenizer, model, eos)
    trim_memory()
    return model


def from_objects(
    model: Any, tokenizer: Any, *, name: str = "", context_length: int | None = None,
    engine: str | None = None,
) -> TorchModel:  # fmt: skip
    """Run a model that is already in memory, on its own device and in its own dtype.

    `model` is left as it is: on CPUs its linear layers are packed into copies, so it then takes
    about twice its memory. Later changes of its weights do not show here.
    """
    label = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    loading.refuse_unfit(model.config, label)
    training = model.training
    model.eval()
    try:
        built = _build(model, None, context_length, label, engine)
    finally:
        model.train(training)
    built.vocabulary = _vocabulary(tokenizer, built, loading.eos_ids(model))
    return built


def _vocabulary(tokenizer: Any, model: TorchModel, eos: list[int]) -> Vocabulary:
    from anydraft.vocabulary import Vocabulary

    return Vocabulary.from_hf(tokenizer, model.vocab_size, name=model.name, eos_ids=eos)


def _device(wanted: str | None) -> torch.device:
    if wanted is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.empty(0, device=wanted)
        return torch.device(wanted)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"the device {wanted!r} cannot be used: {error}") from error


def _dtype(wanted: str | None, device: torch.device, role: str) -> tuple[torch.dtype, bool]:
    """The dtype to load in, and whether the layers' weights are rounded to 4 bits."""
    int4 = device.type == "cpu" and int4_is_there()
    if wanted == "int4" and not int4:
        raise ModelError("dtype int4 needs an x86 CPU and a PyTorch with 4-bit products")
    # Fewer bytes to stream per draft step, and no draft's rounding can reach the output.
    if wanted == "int4" or (wanted is None and role == "draft" and int4):
        return torch.bfloat16, True
    if wanted is None:
        return _DEFAULT_DTYPE.get(device.type, torch.float32), False
    if wanted not in _DTYPES:
        raise ModelError(f"unknown dtype {wanted!r}; known: {', '.join(_DTYPES)}, int4")
    return _DTYPES[wanted], False


def _limit(config: Any, wanted: int | None, name: str) -> int | None:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    own = own if isinstance(own, int) and own > 0 else None
    if wanted is None:
        return own
    if wanted < 1 or (own is not None and wanted > own):
        raise ModelError(f"context_length {wanted} is outside 1 to {own}, what {name} was made for")
    return wanted


@torch.no_grad()
def _build(
    stock: Any,
    reread: Callable[[], Any] | None,
    context: int | None,
    name: str,
    only: str | None,
    embedding: tuple[Tensor, RowSource] | None = None,
    int4: bool = False,
) -> TorchModel:
    """Try the engines in order; each is compared with `stock`'s logits on random ids.

    Args:
        embedding: see `loading.mapped_embedding`.
        reread: loads the model anew, if `stock` is ours to use up; None if it is the user's.
    """
    loading.refuse_stateful(stock, name)
    limit = _limit(stock.config, context, name)
    ids, expected = _reference(stock, limit, name)
    kinds = ("fused", "modules", "stock") if only is None else (only,)
    reason = ""
    model: Any = stock
    for kind in kinds:
        if model is None and reread is not None:
            model = reread()
        try:
            engine, model = _engine(kind, model, limit, reread is not None, embedding, int4)
            rope = LengthRope(getattr(engine, "model", None))
            built = TorchModel(engine, expected.shape[1], limit, rope, name)
            difference = _compare(built, ids, expected)
            if difference is None:
                return built
            reason = f"the {kind} pass differs from the stock one by {difference}"
        except (NotFusable, UnfitModel) as error:
            reason = str(error)
            level = logging.DEBUG
        except Exception as error:  # whatever a model's own code raises on the way
            if kind == kinds[-1]:
                raise UnsupportedModelError(f"{name} cannot be run: {error}") from error
            reason = f"the {kind} pass failed: {type(error).__name__}: {error}"
            level = logging.WARNING
        else:
            level = logging.WARNING
        log.log(level, "%s: %s", name, reason)
    raise UnsupportedModelError(f"{name}: {reason}")


def _engine(
    kind: str,
    model: Any,
    limit: int | None,
    owned: bool,
    embedding: tuple[Tensor, RowSource] | None,
    int4: bool,
) -> tuple[Engine, Any]:
    """(an engine, what is left of the model: None once it is used up)."""
    if kind == "fused":
        fused = FusedEngine(model, limit, consume=owned, embedding=embedding, int4=int4)
        return fused, None if owned else model
    if kind == "modules":
        inner = model if owned else shell(model)
        engine = ModuleEngine(inner, limit)
        if inner.device.type == "cpu":
            pack_modules(inner, int4=int4)
        return engine, None if owned else model
    if kind == "stock":
        return StockEngine(model), model
    raise ModelError(f"unknown engine {kind!r}; known: fused, modules, stock")


def _reference(stock: Any, limit: int | None, name: str) -> tuple[list[int], Tensor]:
    """Random ids and the model's own logits for them, after making sure that it is causal."""
    size = int(stock.get_input_embeddings().weight.shape[0])
    count = min(_CHECKED, limit or _CHECKED)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size, (1, count), generator=generator)
    try:
        out = stock(input_ids=ids.to(stock.device), use_cache=False).logits[0].float()
        half = stock(input_ids=ids[:, : count // 2].to(stock.device), use_cache=False).logits[0]
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: the model's own forward fails: {type(error).__name__}: {error}"
        ) from error
    if not _close(half.float(), out[: count // 2], stock.dtype):
        raise UnsupportedModelError(
            f"{name} is an encoder, not a causal language model: its logits depend on later tokens"
        )
    return ids[0].tolist(), out


def _compare(model: TorchModel, ids: list[int], expected: Tensor) -> str | None:
    """None if the engine agrees with the stock logits: in pieces, in company, rolled back."""
    quick = isinstance(model.engine, FusedEngine) and model.engine.finds_argmax
    if quick:
        model.engine.first_ids = _FIRST_IDS
    try:
        state, other = model.new_state(), model.new_state()
        third = max(1, len(ids) // 3)
        first = model.extend([(other, ids[:1], 1), (state, ids[:third], third)])[1]
        model.extend([(state, ids[::-1][: len(ids) - third], 0)])
        state.rollback(third)
        rest = model.extend([(state, ids[third:], len(ids) - third), (other, ids[1:2], 1)])[0]
        state.rollback(third)
        single = [model.extend([(state, [token_id], 1)])[0] for token_id in ids[third : third + 3]]
        model._note_widths(torch.cat(single), rest[:3])
    finally:
        if quick:
            model.engine.first_ids = None
    state.close()
    other.close()
    got, bound = torch.cat([first, rest]), _bound(expected, model.dtype)
    if quick:
        expected = expected[:, :_FIRST_IDS]
    if got.shape == expected.shape and bool((got - expected).abs().max() <= bound):
        return None
    return f"{(got - expected).abs().max():.3g}, of {expected.abs().max():.3g}"


def _bound(expected: Tensor, dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 1e-1) * max(1.0, float(expected.abs().max()))


def _close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return bool((got - expected).abs().max() <= _bound(expected, dtype))  # False for NaN
