"""One llama_context: the KV of many sequences, decoding ragged batches of their tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anydraft.backends.llama_library import Handle, collected_errors, library
from anydraft.backends.llama_loading import Options, context_params
from anydraft.errors import ModelError, StateError

MOST_OUTPUTS = 128
"""Rows of logits of one llama_decode: it reserves memory for so many."""


class NoRoom(Exception):
    """The KV cells do not suffice for the batch; nothing was processed."""


class Context:
    """See the module.

    Attributes:
        cells: tokens that it can hold, all sequences together.
        sequences: how many there can be.
    """

    def __init__(self, handle: Handle, options: Options, cells: int, sequences: int) -> None:
        api = library()
        self.cells, self.sequences = cells, sequences
        params = context_params(options, cells, sequences, MOST_OUTPUTS)
        with collected_errors() as errors:
            pointer = api.llama_init_from_model(handle.pointer, params)
        if not pointer:
            reason = "; ".join(errors) or "no reason given"
            raise ModelError(
                f"{handle.name}: llama.cpp cannot make room for {cells:,} tokens: {reason}"
            )
        self._handle = handle  # the model must outlive its contexts
        self._pointer = pointer
        self._free = weakref.finalize(self, api.llama_free, pointer)
        self._memory = api.llama_get_memory(pointer)
        self._width = api.llama_vocab_n_tokens(handle.vocab)
        self._size = min(options.n_batch, cells)
        self._batch, self._arrays = _new_batch(self._size, sequences)
        self._api = api
        self._viewed: tuple[int | None, int] = None, 0
        self._logits = np.empty((0, self._width), np.float32)

    @property
    def most_tokens(self) -> int:
        """Of one call of `decode`."""
        return self._size

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        outputs: Sequence[int],
    ) -> npt.NDArray[np.float32]:
        """One llama_decode.

        Args:
            tokens, positions, sequences: one entry per token.
            outputs: 1 where logits are wanted.

        Returns:
            (rows, vocabulary): a view of the library's own buffer, valid until the next call.

        Raises:
            NoRoom: too few free cells.
            StateError: the library failed.
        """
        count, arrays, api = len(tokens), self._arrays, self._api
        arrays.token[:count] = tokens
        arrays.position[:count] = positions
        arrays.sequence[:count] = [arrays.table_address + 4 * n for n in sequences]
        arrays.output[:count] = outputs
        self._batch.n_tokens = count
        with collected_errors() as errors:
            code = api.llama_decode(self._pointer, self._batch)
        if code == 1:
            raise NoRoom
        if code != 0:
            raise StateError(f"llama.cpp failed ({code}): {'; '.join(errors) or 'no reason given'}")
        rows = sum(outputs)
        if not rows:
            return np.empty((0, self._width), np.float32)
        return self._view(api.llama_get_logits(self._pointer), rows)

    def _view(self, pointer: Any, rows: int) -> npt.NDArray[np.float32]:
        """So many rows of logits in the library's memory; it hardly ever lies elsewhere."""
        key = ctypes.addressof(pointer.contents), rows
        if key != self._viewed:
            self._logits = np.ctypeslib.as_array(pointer, (rows, self._width))
            self._viewed = key
        return self._logits

    def remove(self, sequence: int, start: int) -> None:
        """Forget a sequence's tokens from position `start` on.

        Raises:
            StateError: this model's memory cannot do it.
        """
        if not library().llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise StateError(f"llama.cpp cannot cut a sequence at {start} with this model")

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target`, which must be empty, share the first `length` tokens of `source`."""
        library().llama_memory_seq_cp(self._memory, source, target, 0, length)

    def save(self) -> Any:
        """Keys and values of all sequences."""
        api = library()
        size = api.llama_state_get_size(self._pointer)
        saved = (ctypes.c_uint8 * size)()
        if api.llama_state_get_data(self._pointer, saved, size) != size:
            raise StateError("llama.cpp cannot save its keys and values")
        return saved

    def restore(self, saved: Any) -> None:
        """What another context of the same model and options has saved."""
        if not library().llama_state_set_data(self._pointer, saved, len(saved)):
            raise StateError("llama.cpp cannot restore its keys and values")

    def close(self) -> None:
        self._free()


class _Arrays:
    """The memory behind a llama_batch; numpy fills what ctypes would fill one by one."""

    def __init__(self, size: int, sequences: int) -> None:
        self.token = np.zeros(size, np.int32)
        self.position = np.zeros(size, np.int32)
        self.ones = np.ones(size, np.int32)
        self.table = np.arange(sequences, dtype=np.int32)
        self.table_address = self.table.ctypes.data
        self.sequence = np.zeros(size, np.uintp)
        self.output = np.zeros(size, np.int8)


def _new_batch(size: int, sequences: int) -> tuple[Any, _Arrays]:
    api = library()
    arrays = _Arrays(size, sequences)
    batch = api.llama_batch()
    kinds = dict(api.llama_batch._fields_)

    def pointer(array: npt.NDArray[Any], name: str) -> Any:
        return ctypes.cast(array.ctypes.data, kinds[name])

    batch.token = pointer(arrays.token, "token")
    batch.pos = pointer(arrays.position, "pos")
    batch.n_seq_id = pointer(arrays.ones, "n_seq_id")
    batch.seq_id = pointer(arrays.sequence, "seq_id")
    batch.logits = pointer(arrays.output, "logits")
    return batch, arrays
