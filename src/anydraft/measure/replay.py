"""A model that remembers: the same prefix costs a pass once, however often it is drawn from.

The statistics of the laboratory need ten thousands of draws at a few prefixes. `Replay` stands in
front of a real model with exactly its interface, so that the real loop and the real drafters run;
its states only count, and its rows come from memory after the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anydraft.errors import RollbackError, StateError
from anydraft.model import Extension, LanguageModel, ModelState, checked_states

LANES = 4
"""Most prefixes that are worked out in one pass; each lane has read the prompt for itself."""
MEMORY = 2**30
"""Bytes of rows that are kept; beyond, the memory starts over. A wide row is a megabyte."""


class _Node:
    """A prefix: the token that ends it, and the logits after it once they are known."""

    __slots__ = ("children", "depth", "parent", "row", "token")

    def __init__(self, parent: _Node | None, token: int) -> None:
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, _Node] = {}
        self.row: torch.Tensor | None = None

    def child(self, token: int) -> _Node:
        found = self.children.get(token)
        if found is None:
            found = self.children[token] = _Node(self, token)
        return found

    def tokens(self) -> list[int]:
        node, found = self, list[int]()
        while node.parent is not None:
            found.append(node.token)
            node = node.parent
        return found[::-1]


class ReplayState:
    """A place in the tree of prefixes."""

    __slots__ = ("closed", "node", "owner")

    def __init__(self, owner: Replay, node: _Node) -> None:
        self.owner = owner
        self.node = node
        self.closed = False

    @property
    def length(self) -> int:
        return self.node.depth

    def rollback(self, length: int) -> None:
        if self.closed:
            raise StateError("this state is closed")
        if not 0 <= length <= self.node.depth:
            raise RollbackError(f"cannot roll back to {length}: the state holds {self.length}")
        while self.node.depth > length:
            assert self.node.parent is not None
            self.node = self.node.parent

    def close(self) -> None:
        self.closed = True


class _Lane:
    """One real state, moved from prefix to prefix."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._state: ModelState | None = None
        self.held: list[int] = []

    def move(self, tokens: list[int], num_rows: int) -> Extension:
        """Make the state ready; returns what `extend` needs for the last rows of `tokens`."""
        shared = 0
        for old, new in zip(self.held, tokens[: len(tokens) - num_rows], strict=False):
            if old != new:
                break
            shared += 1
        if self._state is not None:
            shared = min(shared, self._state.length)
            try:
                self._state.rollback(shared)
            except RollbackError:  # out of this model's reach: start again
                self.close()
        if self._state is None:
            self._state, shared = self._model.new_state(), 0
        self.held = tokens
        return self._state, tokens[shared:], num_rows

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        self._state, self.held = None, []


class Replay:
    """A LanguageModel in front of another one, with a memory of its rows.

    Args:
        model: the real model. Closing the Replay leaves it open.

    Attributes:
        rows_computed: distinct prefixes that the real model has worked out.
        rows_served: rows handed out.
        passes: passes of the real model.
    """

    closed = False

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.name = model.name
        self.runtime = model.runtime
        self.vocabulary = model.vocabulary
        self.vocab_size = model.vocab_size
        self.max_length = model.max_length
        self.rows_computed = self.rows_served = self.passes = 0
        self._root = _Node(None, -1)
        self._lanes: list[_Lane] = []
        self._known: list[_Node] = []

    def new_state(self) -> ReplayState:
        return ReplayState(self, self._root)

    def extend(self, batch: Sequence[Extension]) -> list[torch.Tensor]:
        """See LanguageModel.extend. Rows are copies: the caller may change them."""
        states = checked_states(self, batch, ReplayState)
        ends: list[_Node] = []
        wanted: list[list[_Node]] = []
        for state, (_, token_ids, num_logits) in zip(states, batch, strict=True):
            node = state.node
            path = []
            for token_id in token_ids:
                node = node.child(token_id)
                path.append(node)
            ends.append(node)
            wanted.append(path[len(path) - num_logits :])
        self._make_room()
        self._work_out([node for nodes in wanted for node in nodes if node.row is None])
        results = []
        for state, end, nodes in zip(states, ends, wanted, strict=True):
            rows = [node.row for node in nodes if node.row is not None]
            results.append(torch.stack(rows) if rows else torch.empty(0, self.vocab_size))
            self.rows_served += len(rows)
            state.node = end
        return results

    def rows(self, prefixes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """(vocab_size,) logits after each of these token sequences; shared, not to be changed."""
        nodes = []
        for prefix in prefixes:
            node = self._root
            for token_id in prefix:
                node = node.child(token_id)
            nodes.append(node)
        self._make_room()
        self._work_out([node for node in nodes if node.row is None])
        return [node.row for node in nodes if node.row is not None]

    def forget(self) -> None:
        """Drop all rows; states made before must not be used again."""
        self._root = _Node(None, -1)
        self._known = []

    def close(self) -> None:
        """Free the memory. The real model stays open: it belongs to the caller."""
        self.forget()
        for lane in self._lanes:
            lane.close()
        self._lanes = []

    def _make_room(self) -> None:
        if len(self._known) * self.vocab_size * 4 > MEMORY:
            for node in self._known:
                node.row = None
            self._known = []

    def _work_out(self, missing: Sequence[_Node]) -> None:
        """Let the real model score these prefixes, several in each pass."""
        jobs: list[tuple[_Node, int]] = []  # (deepest prefix, how many rows up from it)
        left = {id(node) for node in missing}
        for node in sorted(missing, key=lambda n: -n.depth):
            if id(node) not in left:
                continue
            above, num_rows = node, 0
            for distance in range(1, min(16, node.depth) + 1):  # its missing forebears come along
                if id(above) in left:
                    left.remove(id(above))
                    num_rows = distance
                assert above.parent is not None
                above = above.parent
            jobs.append((node, num_rows))
        lanes = min(LANES, max(1, len(jobs) // 4))
        while len(self._lanes) < lanes:
            self._lanes.append(_Lane(self.model))
        for start in range(0, len(jobs), lanes):
            group = jobs[start : start + lanes]
            extensions = [
                lane.move(node.tokens(), num_rows)
                for lane, (node, num_rows) in zip(self._lanes, group, strict=False)
            ]
            self.passes += 1
            for (node, _), rows in zip(group, self.model.extend(extensions), strict=True):
                at: _Node | None = node
                for row in reversed(rows.float().cpu()):
                    assert at is not None
                    if at.row is None:
                        at.row = row.clone()
                        self._known.append(at)
                        self.rows_computed += 1
                    at = at.parent
