"""GGUF models through llama.cpp, as a LanguageModel.

    model = load("gemma3-270m")          # .gguf file, pulled name, hub id with a file pattern

All states share one llama_context; `extend` is one llama_decode for all of them, more only where a
prompt is longer than `n_batch`. Logits are copied once, out of the library's buffer, because the
next pass overwrites it and the caller may keep them.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from anydraft.backends.llama_context import MOST_OUTPUTS, Context, NoRoom
from anydraft.backends.llama_loading import Options, cell_bytes, free_memory, open_file
from anydraft.errors import (
    AnydraftError,
    ModelError,
    NumericsError,
    RollbackError,
    StateError,
)
from anydraft.model import checked_states

if TYPE_CHECKING:
    from anydraft.backends.llama_library import Handle
    from anydraft.gguf_file import GgufHeader
    from anydraft.model import Extension
    from anydraft.vocabulary import Vocabulary

log = logging.getLogger(__name__)

Ids: TypeAlias = npt.NDArray[np.int64]

_PAD = 256  # llama.cpp rounds numbers of cells up to this
_FIRST_CELLS = 2048
_FIRST_SEQUENCES = 8
_MOST_KEPT = 4
"""Closed states whose keys and values stay, for prompts that begin alike."""
_LEAST_SHARED = 16
"""Tokens in common that are worth sharing."""


class LlamaState:
    """One sequence of a LlamaModel."""

    def __init__(
        self, owner: LlamaModel, sequence: int, released: deque[int], own: Context | None = None
    ) -> None:
        self.owner = owner
        self.sequence = sequence
        self.own = own
        """A context of its own, in exact mode."""
        self.tokens: list[int] = []
        self.closed = False
        # A state that nobody closed gives its place back when it is collected.
        self._abandoned = weakref.finalize(self, released.append, sequence)
        self._abandoned.atexit = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rollback(self, length: int) -> None:
        with self.owner.lock:
            if self.closed or self.owner.closed:
                raise StateError("a closed model" if self.owner.closed else "this state is closed")
            if not 0 <= length <= len(self.tokens):
                raise RollbackError(f"cannot roll back to {length}: the state holds {self.length}")
            self.owner.cut(self, length)

    def close(self) -> None:
        with self.owner.lock:
            if not self.closed:
                self.closed = True
                self._abandoned.detach()
                self.owner.release(self)
                self.tokens = []


class LlamaModel:
    """See the module. Safe to use from several threads: passes take turns."""

    runtime = "llama_cpp"

    def __init__(
        self,
        header: GgufHeader,
        handle: Handle,
        options: Options,
        name: str,
        context: int | None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        from anydraft.vocabulary_gguf import read_vocabulary

        self.name = name
        self.header = header
        self.options = options
        self.closed = False
        self.lock = threading.RLock()
        self.abandoned: deque[int] = deque()
        self._handle = handle
        self.vocabulary = vocabulary or read_vocabulary(header, handle, name)
        self.vocab_size = _same_size(self.vocabulary, handle, name)
        self.max_length = _limit(handle, options, context, name)
        cells, self._most_cells = _cells(header, options, self.max_length)
        self._first_cells = cells
        sequences = 1 if options.exact else min(_FIRST_SEQUENCES, options.n_seq_max)
        self._context = Context(handle, options, cells, sequences)
        self._free = list(range(sequences))[::-1]
        self._kept: dict[int, list[int]] = {}  # sequence -> tokens, the oldest first
        self._live: weakref.WeakSet[LlamaState] = weakref.WeakSet()
        if options.exact:
            self._refuse_inexact()

    @property
    def width_exact(self) -> bool:
        """Whether a row's logits have the same bits at any number of rows in a pass."""
        return self.options.exact

    def new_state(self) -> LlamaState:
        with self.lock:
            if self.closed:
                raise StateError(f"{self.name} was closed")
            if self.options.exact:
                state = LlamaState(self, 0, deque(), self._own_context())
            else:
                state = LlamaState(self, self._new_sequence(), self.abandoned)
            self._live.add(state)
            return state

    def context_of(self, state: LlamaState) -> Context:
        """Where a state's keys and values lie."""
        return state.own or self._context

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        return self._guarded(batch, None)

    def extend_greedy(
        self, batch: Sequence[Extension], forbidden: Sequence[Sequence[int] | None]
    ) -> list[torch.Tensor]:
        """See GreedyModel: rows are searched where the library left them, and not copied."""
        masks = [np.asarray(ids, np.int64) for ids in forbidden if ids is not None]
        return self._guarded(batch, masks if len(masks) == len(batch) else None)

    def _guarded(
        self, batch: Sequence[Extension], forbidden: list[Ids] | None
    ) -> list[torch.Tensor]:
        with self.lock:
            states = checked_states(self, batch, LlamaState)
            before = [state.length for state in states]
            try:
                return self._extend(states, batch, forbidden)
            except BaseException:  # an interrupt too: no length changes, no half-written tail stays
                for state, length in zip(states, before, strict=True):
                    if not (state.closed or self.closed):
                        del state.tokens[length:]
                        self.context_of(state).remove(state.sequence, length)
                raise

    def close(self) -> None:
        """Free weights, keys and values; states of this model are of no further use."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._context.close()
                self._handle.close()

    # --- states -----------------------------------------------------------------------------------

    def cut(self, state: LlamaState, length: int) -> None:
        """Forget what `state` holds beyond `length`."""
        if length < state.length:
            self.context_of(state).remove(state.sequence, length)
            del state.tokens[length:]

    def release(self, state: LlamaState) -> None:
        """Take a closed state's sequence back; its keys and values may serve the next prompt."""
        self._live.discard(state)
        if state.own is not None:
            state.own.close()
        if self.closed or state.own is not None:
            return
        if self.options.cache_prompt and state.length >= _LEAST_SHARED:
            self._kept[state.sequence] = state.tokens
            while len(self._kept) > _MOST_KEPT:
                self._forget_oldest()
        else:
            self._vacate(state.sequence)

    def _vacate(self, sequence: int) -> None:
        self._context.remove(sequence, 0)
        self._free.append(sequence)

    def _forget_oldest(self) -> None:
        sequence = next(iter(self._kept))
        del self._kept[sequence]
        self._vacate(sequence)

    def _new_sequence(self) -> int:
        while self.abandoned:
            self._vacate(self.abandoned.popleft())
        if not self._free and self._kept:
            self._forget_oldest()
        if not self._free:
            have, most = self._context.sequences, self.options.n_seq_max
            if have >= most:
                raise self._too_many()
            self._context = self._moved(self._context, self._context.cells, min(most, 2 * have))
            self._free += range(self._context.sequences - 1, have - 1, -1)
        return self._free.pop()

    def _own_context(self) -> Context:
        if len(self._live) >= self.options.n_seq_max:
            raise self._too_many()
        return Context(self._handle, self.options, self._first_cells, 1)

    def _too_many(self) -> StateError:
        return StateError(
            f"{self.name}: all {self.options.n_seq_max} sequences are in use (n_seq_max); close a "
            "state, or run fewer at once"
        )

    # --- passes -----------------------------------------------------------------------------------

    def _extend(
        self,
        states: list[LlamaState],
        batch: Sequence[Extension],
        forbidden: list[Ids] | None,
    ) -> list[torch.Tensor]:
        wanted = [list(ids) for _, ids, _ in batch]
        ends = [state.length + len(ids) for state, ids in zip(states, wanted, strict=True)]
        if self.options.cache_prompt:
            for index, state in enumerate(states):
                if not state.tokens:
                    most = len(wanted[index]) - max(1, batch[index][2])
                    self._share(index, most, states, wanted)
        rest = [
            (state, ids[len(ids) - (end - state.length) :], num_logits)
            for state, ids, end, (_, _, num_logits) in zip(states, wanted, ends, batch, strict=True)
        ]
        if self.options.exact:
            masks = [None] * len(rest) if forbidden is None else [[mask] for mask in forbidden]
            return [self._run([piece], mask) for piece, mask in zip(rest, masks, strict=True)]
        rows = self._run(rest, forbidden)
        if len(batch) == 1:
            return [rows]
        results: list[torch.Tensor] = []
        start = 0
        for _, _, num_logits in batch:
            results.append(rows[start : start + num_logits])
            start += num_logits
        return results

    def _run(
        self,
        pieces: list[tuple[LlamaState, list[int], int]],
        forbidden: list[Ids] | None,
    ) -> torch.Tensor:
        """Process new tokens of states in one context.

        Args:
            forbidden: per piece the ids that may not win; None: logits are wanted.

        Returns:
            The logits of all, one after another, or the best id of each row.
        """
        # Lists, not arrays: passes are mostly over one token, and every call of numpy after one
        # costs microseconds, since the weights have gone through all caches.
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        outputs: list[int] = []
        masks: list[Ids] = []
        for index, (state, ids, rows) in enumerate(pieces):
            tokens += ids
            positions += range(state.length, state.length + len(ids))
            sequences += [state.sequence] * len(ids)
            outputs += [0] * (len(ids) - rows) + [1] * rows
            if forbidden is not None:
                masks += [forbidden[index]] * rows
        found: list[torch.Tensor] = []
        best: list[int] = []
        start = 0
        while start < len(tokens):
            context = self.context_of(pieces[0][0])
            end = self._chunk_end(start, outputs, context.most_tokens)
            part = slice(start, end)
            try:
                logits = context.decode(
                    tokens[part], positions[part], sequences[part], outputs[part]
                )
            except NoRoom:
                self._make_room(end - start, pieces[0][0])
                continue
            if forbidden is None:
                found.append(torch.tensor(logits))  # a copy: the next pass overwrites them
            else:
                best += [self._best(row, masks[len(best) + n]) for n, row in enumerate(logits)]
            start = end
        if forbidden is None:
            result = found[0] if len(found) == 1 else torch.cat(found)
        else:
            result = torch.from_numpy(np.array(best, np.int64))
        for state, ids, _ in pieces:
            state.tokens += ids
        return result

    def _best(self, logits: np.ndarray[Any, Any], forbidden: Ids) -> int:
        """The arg-max of a row (vocab_size,), which is overwritten; the lowest id on a tie."""
        if len(forbidden):
            logits[forbidden] = -np.inf
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            raise NumericsError(f"{self.name}: a row of logits has no best id")
        return best

    def _chunk_end(self, start: int, outputs: list[int], room: int) -> int:
        end = min(len(outputs), start + room)
        most = min(MOST_OUTPUTS, room)
        if end - start <= most:
            return end
        where = [n for n in range(start, end) if outputs[n]]
        return end if len(where) <= most else where[most]

    # --- sharing prompts --------------------------------------------------------------------------

    def _share(
        self, index: int, most: int, states: list[LlamaState], wanted: list[list[int]]
    ) -> None:
        """Let an empty state take over the start of its prompt from whoever has it already.

        Of states in the same batch whose prompts begin alike, the first one processes what they
        have in common.
        """
        if most < _LEAST_SHARED:
            return
        state, ids = states[index], wanted[index]
        best, source, leader = _LEAST_SHARED - 1, -1, -1
        for sequence, tokens in self._kept.items():
            if (shared := _common(tokens, ids, most)) > best:
                best, source = shared, sequence
        for other in self._live:
            if (shared := _common(other.tokens, ids, most)) > best:
                best, source = shared, other.sequence
        for before in range(index):
            if (shared := _common(wanted[before], ids, most)) > best:
                best, leader = shared, before
        if leader >= 0:
            first = states[leader]
            if first.length < best:
                self._run([(first, wanted[leader][first.length : best], 0)], None)
            source = first.sequence
        if source < 0:
            return
        if source in self._kept:
            self._kept[source] = self._kept.pop(source)  # the youngest now
        self._context.copy(source, state.sequence, best)
        state.tokens = ids[:best]

    # --- room -------------------------------------------------------------------------------------

    def _make_room(self, count: int, state: LlamaState) -> None:
        """Find cells for `count` more tokens, or say why not.

        Raises:
            StateError: n_ctx is used up, or memory is.
        """
        if self._kept:
            self._forget_oldest()
            return
        have = self.context_of(state).cells
        if have >= self._most_cells:
            raise StateError(
                f"{self.name}: its {have:,} tokens of keys and values are used up by "
                f"{len(self._live)} states, and {count} more are to be processed: close a state, "
                f"or choose a larger n_ctx"
            )
        cells = min(2 * have, self._most_cells)
        if state.own is not None:
            state.own = self._moved(state.own, cells, 1)
        else:
            self._context = self._moved(self._context, cells, self._context.sequences)

    def _moved(self, old: Context, cells: int, sequences: int) -> Context:
        """A larger context in place of `old`, with everything that it holds.

        Raises:
            StateError: there is no memory for both; `old` stays.
        """
        # The new one, and what is saved of the old one on the way.
        needed = (cells + old.cells) * cell_bytes(self.header, self.options)
        if needed > (free := free_memory()):
            raise StateError(
                f"{self.name}: keys and values of {cells:,} tokens need {needed / 1e9:.1f} GB "
                f"more, and {free / 1e9:.1f} GB are free; run fewer states, or shorter ones"
            )
        saved = old.save()
        try:
            new = Context(self._handle, self.options, cells, sequences)
        except ModelError as error:
            raise StateError(str(error)) from error
        new.restore(saved)
        old.close()
        log.debug("%s: now %d cells for %d sequences", self.name, cells, sequences)
        return new

    # --- exact mode -------------------------------------------------------------------------------

    def _refuse_inexact(self) -> None:
        """Compare rows of passes of one token with those of several, bit for bit.

        Raises:
            ModelError: they differ, so this model cannot run in exact mode on this machine.
        """
        count = min(16, self.max_length)
        ids = [(7919 * n + 1) % self.vocab_size for n in range(count)]
        rows: list[torch.Tensor] = []
        for width in (1, 2, 3, 9):
            state = self.new_state()
            parts = [ids[start : start + width] for start in range(0, count, width)]
            rows.append(torch.cat([self.extend([(state, p, len(p))])[0] for p in parts]))
            state.close()
            if not torch.equal(rows[0], rows[-1]):
                raise ModelError(
                    f"{self.name} cannot run in exact mode here: passes of {width} tokens round "
                    "differently from passes of one"
                )


def load(
    spec: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context_length: int | None = None,
    trust_remote_code: bool = False,
    role: str = "target",
    vocabulary: Vocabulary | None = None,
    name: str | None = None,
    **options: Any,
) -> LlamaModel:
    """Open a GGUF file with llama.cpp.

    Args:
        spec: a .gguf file, a folder with one, a pulled name, or a hub id with a file pattern
            ("organisation/name:*Q4_K_M*").
        device: "cpu" keeps all layers off the GPU.
        dtype: must be None: the file's own types are what runs.
        context_length: a limit per state, below the model's own.
        trust_remote_code: ignored: a GGUF file brings no code.
        role: "target" or "draft": what the model is for.
        vocabulary: of its ids, in place of the file's own, which it then need not have.
        name: what it is called; None: as in `spec`.
        options: see Options.

    Raises:
        ModelNotFoundError, ModelFileError, UnsupportedModelError, VocabularyError, ModelError: in
            words.
    """
    from anydraft.store_gguf import resolve_gguf

    if dtype is not None:
        raise ModelError(
            f"dtype {dtype!r} cannot be chosen for a GGUF file: its weights run as they are stored"
        )
    known = [f.name for f in fields(Options)]
    for option in options:
        if option not in known:
            raise ModelError(f"unknown option {option!r} of llama_cpp; known: {', '.join(known)}")
    if device is not None:
        if device == "cpu":
            options.setdefault("n_gpu_layers", 0)
        elif device.partition(":")[0] not in ("cuda", "mps", "gpu"):
            raise ModelError(f"unknown device {device!r}; known: cpu, cuda, cuda:1, mps, gpu")
        elif device.partition(":")[2].isdigit():
            options.setdefault("main_gpu", int(device.partition(":")[2]))
    chosen = Options(**options)
    path, name = resolve_gguf(spec), name or str(spec)
    header, handle = open_file(path, name, chosen, with_tokenizer=vocabulary is None)
    try:
        return LlamaModel(header, handle, chosen, name, context_length, vocabulary)
    except AnydraftError:
        handle.close()
        raise


def _same_size(vocabulary: Vocabulary, handle: Handle, name: str) -> int:
    """How many ids there are, for the model as for its vocabulary."""
    from anydraft.backends.llama_library import library

    size = int(library().llama_vocab_n_tokens(handle.vocab))
    if size != vocabulary.size:
        raise ModelError(f"{name} has {size:,} ids, and its vocabulary {vocabulary.size:,}")
    return size


def _limit(handle: Handle, options: Options, wanted: int | None, name: str) -> int:
    """Most tokens of one state."""
    from anydraft.backends.llama_library import library

    own = int(library().llama_model_n_ctx_train(handle.pointer))
    if wanted is not None and not 1 <= wanted <= own:
        raise ModelError(f"context_length {wanted} is outside 1 to {own}, what {name} was made for")
    limit = own if wanted is None else wanted
    return limit if options.n_ctx is None else min(limit, options.n_ctx)


def _cells(header: GgufHeader, options: Options, limit: int) -> tuple[int, int]:
    """(cells to begin with, most there may ever be)."""
    if options.n_ctx is not None:
        cells = _padded(options.n_ctx)
        return cells, cells
    if any("rope_factors_long" in tensor.name for tensor in header.tensors):
        # llama.cpp chooses these factors by the number of cells: changing it would change the model
        return _padded(limit), _padded(limit)
    return min(_padded(limit), _FIRST_CELLS), 1 << 30


def _padded(cells: int) -> int:
    return -(-cells // _PAD) * _PAD


def _common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Length of the common prefix, at most `most`."""
    low, high = 0, min(len(a), len(b), most)
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:  # b[:low] is common, b[:high] is not
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
