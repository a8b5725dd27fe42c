"""Near-ties between tokens so unlikely that they are drawn together, by a sum over their ids."""

from __future__ import annotations

import math

import numpy as np
import torch

from anydraft.identity import _smallest_move
from anydraft.noise import HEAD_NATS, Noise, draw
from anydraft.sampling import Law

BOUND = 0.05
SIZE = 20_000


def test_a_shifted_sum_over_unlikely_tokens_is_a_near_tie() -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 63, SIZE, dtype=np.uint64)
    source = torch.Generator().manual_seed(1)
    row = torch.rand(SIZE, generator=source) - HEAD_NATS - 2
    row[:2] = torch.tensor([0.0, -1.0])  # all others lie below what is drawn one by one
    near = 0
    for seed in range(400):
        noise = Noise(seed, 0, [1])

        def drawn(logits: torch.Tensor, noise: Noise = noise) -> int:
            scores = logits.numpy()
            return draw(Law(None, scores - scores.max()), noise, 0, keys)

        own = drawn(row)
        if own < 2:
            continue
        emitted = drawn(row + BOUND * (2 * torch.rand(SIZE, generator=source) - 1))
        if emitted != own and emitted >= 2:
            near += 1
            assert _smallest_move(row, own, emitted, drawn, BOUND) <= BOUND
            far = 2 + (own + SIZE // 2) % (SIZE - 2)
            assert math.isinf(_smallest_move(row, own, far, drawn, BOUND))
    assert near >= 3
