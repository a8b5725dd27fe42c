"""The PyTorch backend on the two real models: same bits at every width, wrapped windows, memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anydraft.backends import load_model, torch_hf

pytestmark = pytest.mark.slow

MEMORY = """
import sys, time
import psutil
from anydraft.backends import load_model

resident = lambda: psutil.Process().memory_info().rss
start = time.perf_counter()
model = load_model(sys.argv[1], device="cpu")
print("seconds", time.perf_counter() - start)
seen = []
greedy = sys.argv[2] == "greedy"


def extend(state, new):
    batch = [(state, new, 1)]
    return (model.extend_greedy(batch, [()]) if greedy else model.extend(batch))[0][0]


for turn in range(20):
    state = model.new_state()
    new = [2, *range(1000, 1060 + turn)]
    for _ in range(6):
        row = extend(state, new)
        new = [int(row.argmax()) if row.dim() else int(row)]
    state.close()
    seen.append(resident())
print("resident", *seen)
"""


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> torch_hf.TorchModel:
    model = load_model(gemma_path, device="cpu")
    assert isinstance(model, torch_hf.TorchModel)
    return model


def random_ids(count: int) -> list[int]:
    return random.Random(4).choices(range(300, 40000), k=count)


def test_gemma_has_the_same_bits_at_every_width(gemma: torch_hf.TorchModel) -> None:
    if not gemma.width_exact:
        pytest.skip("no kernel here gives rows the same bits at every width")
    ids = random_ids(90)
    state = gemma.new_state()
    gemma.extend([(state, ids[:54], 0)])  # the rows after it cross a block of keys
    plain = torch.cat([gemma.extend([(state, [i], 1)])[0] for i in ids[54:]])
    for width in range(2, 10):
        state.rollback(54)
        for start in range(54, 90, width):
            part = ids[start : start + width]
            [got] = gemma.extend([(state, part, len(part))])
            assert torch.equal(got, plain[start - 54 : start - 54 + width]), (width, start)
    state.close()


def test_gemma_beyond_its_window_is_what_transformers_computes(
    gemma: torch_hf.TorchModel, gemma_path: Path
) -> None:
    """1,200 tokens, window 512; the last rows one by one after a rollback across the wrap."""
    from transformers import AutoModelForCausalLM

    ids = random_ids(1200)
    stock = AutoModelForCausalLM.from_pretrained(gemma_path, dtype=torch.float32)
    with torch.no_grad():
        expected = stock(input_ids=torch.tensor([ids]), logits_to_keep=6).logits[0]
    state = gemma.new_state()
    gemma.extend([(state, [*ids[:1194], *ids[:300]], 3)])
    state.rollback(1194)
    got = torch.cat([gemma.extend([(state, [i], 1)])[0] for i in ids[1194:]])
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    state.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm_runs_fused(smollm_path: Path, dtype: str) -> None:
    model = torch_hf.load(smollm_path, device="cpu", dtype=dtype)
    assert model.engine.kind == "fused"
    state = model.new_state()
    [row] = model.extend([(state, model.vocabulary.encode(b"The capital of France is"), 1)])
    assert model.vocabulary.token_bytes[int(row.argmax())] == b" Paris"
    model.close()


@pytest.mark.parametrize("kind", ["greedy", "logits"])
def test_gemma_in_memory(gemma_path: Path, kind: str) -> None:
    """At most 1.75 times its float32 weights resident, and twenty generations add nothing."""
    weights = (gemma_path / "model.safetensors").stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(gemma_path), kind],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    print(kind, done.stdout)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    seen = [int(value) for value in lines["resident"].split()]
    assert seen[-1] <= 1.75 * weights
    assert seen[-1] - seen[4] < 20e6
