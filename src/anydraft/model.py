"""What a runtime must do: LanguageModel (weights, shared) and ModelState (one sequence's KV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from anydraft.errors import StateError

if TYPE_CHECKING:
    import torch

    from anydraft.vocabulary import Vocabulary


@runtime_checkable
class ModelState(Protocol):
    """The tokens that one sequence has put through a model. Not shared between threads."""

    @property
    def length(self) -> int:
        """How many tokens the model has processed in this state."""

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens, exactly.

        Raises:
            RollbackError: `length` is negative, beyond `self.length`, or out of this model's reach.
                Never a silent no-op.
        """

    def close(self) -> None:
        """Free the memory. Further use raises StateError; closing twice is fine."""


_State = TypeVar("_State", bound=ModelState)

Extension: TypeAlias = tuple[ModelState, Sequence[int], int]
"""(state, new token ids, how many of the last new positions need logits)."""


@runtime_checkable
class LanguageModel(Protocol):
    """Weights of a causal language model. Many states share one model."""

    name: str
    """As the user named it; for messages."""
    runtime: str
    """Name of the backend: "toy", "torch_hf", "llama_cpp"."""
    vocabulary: Vocabulary
    vocab_size: int
    """Width of the logits; may exceed the tokenizer's size (padding ids)."""
    max_length: int | None
    """Context limit in tokens; None where the model has none."""

    def new_state(self) -> ModelState:
        """An empty state.

        Raises:
            StateError: the model was closed.
        """

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        """Process new tokens of several states in one pass (ragged: any lengths, any mix).

        Row i of a result belongs to the i-th of the last `num_logits` new tokens and scores the
        token after it. A prompt is a long extend; there is no prefill.

        Args:
            batch: per state its new token ids (at least one) and 0 <= num_logits <= len(token ids).
                Each state appears at most once.

        Returns:
            Per state a float32 tensor of shape (num_logits, vocab_size), on the model's device. The
            caller may keep and modify it.

        Raises:
            StateError: no tokens, num_logits out of range, an id outside the vocabulary, a closed
                or repeated state, or a length beyond max_length. No state's length has changed.
        """

    def close(self) -> None:
        """Free weights and states."""


@runtime_checkable
class GreedyModel(Protocol):
    """A LanguageModel that can find the best next id without all the logits."""

    def extend_greedy(
        self, batch: Sequence[Extension], forbidden: Sequence[Sequence[int] | None]
    ) -> list[torch.Tensor]:
        """Like `extend`, where some sequences only want the arg-max of each row.

        Args:
            forbidden: per extension None, if its logits are wanted, or the ids that may not win.

        Returns:
            Per extension its logits, or an int64 tensor (num_logits,): the exact arg-max of each
            row's logits without the forbidden ids, the lowest id on a tie. Logits may come where
            arg-maxes were asked for.

        Raises:
            NumericsError: a row without a best id; no state's length has changed.
            StateError: as `extend`.
        """


def checked_states(model: Any, batch: Sequence[Extension], kind: type[_State]) -> list[_State]:
    """The states of a batch, if `extend` may run it: what its contract asks, for every runtime.

    Args:
        model: a LanguageModel with `closed`.
        kind: the class of its states, which have `owner` and `closed`.

    Raises:
        StateError: see LanguageModel.extend.
    """
    states: list[_State] = []
    for state, ids, num_logits in batch:
        mine = getattr(state, "owner", None) is model
        if not isinstance(state, kind) or not mine:
            raise StateError("a state of another model")
        if model.closed or getattr(state, "closed", False):
            raise StateError("a closed model" if model.closed else "a closed state")
        if state in states:
            raise StateError("the same state twice in one batch")
        if not ids:
            raise StateError("no tokens to process")
        if not 0 <= num_logits <= len(ids):
            raise StateError(f"logits of {num_logits} positions asked for, of {len(ids)} new")
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            raise StateError(f"an id outside the vocabulary of {model.vocab_size}")
        if model.max_length is not None and state.length + len(ids) > model.max_length:
            raise StateError(
                f"{state.length} + {len(ids)} tokens exceed the context of {model.max_length}"
            )
        states.append(state)
    return states
