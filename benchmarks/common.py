"""What the benchmarks share: prompts, models, the machine's name, and small statistics."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydraft.measure.bench_machine import cpu_name

PROMPTS = Path(__file__).parent / "prompts"
TARGET = "gemma3-270m"
DRAFT = "smollm2-135m"


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        id: unique over all files.
        kind: prose, question, list, code, numbers, script or copy.
    """

    id: str
    kind: str
    text: str


def prompts(name: str, kinds: Iterable[str] | None = None) -> list[Prompt]:
    """The prompts of `prompts/NAME.jsonl`: general, copy or calibration."""
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [Prompt(**json.loads(line)) for line in lines if line]
    wanted = None if kinds is None else set(kinds)
    return [prompt for prompt in found if wanted is None or prompt.kind in wanted]


def spread(items: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """`count` of the prompts, evenly spaced, so that a short run sees every kind; None is all."""
    if count is None or count >= len(items):
        return list(items)
    step = len(items) / count
    return [items[int(step * (i + 0.5))] for i in range(count)]


def load_draft_options(dtype: str | None) -> dict[str, Any]:
    """Options of the draft; its weights may be stored differently, since it only proposes."""
    return {} if dtype is None else {"dtype": dtype}


def dtype_name(model: Any) -> str:
    """What a loaded model of torch_hf stores its layers in: "float32", "bfloat16", "int4", ..."""
    layers = getattr(model.engine, "linears", [])
    if any(layer.kernel.name == "int4" for layer in layers):
        return "int4"
    return str(model.dtype).removeprefix("torch.")


def machine() -> dict[str, Any]:
    """What a table of measurements has to name."""
    import torch
    import transformers

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine_line() -> str:
    """The same in one line."""
    m = machine()
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads; {m['system']}, "
        f"PyTorch {m['torch']}, transformers {m['transformers']}"
    )


def median(values: Iterable[float]) -> float:
    """The median; NaN for none."""
    found = list(values)
    return statistics.median(found) if found else float("nan")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
