"""What a target pass over n new tokens costs, relative to one, and to transformers' one-row pass.

    python benchmarks/verify_cost.py [--model gemma3-270m] [--context 256] [--json]

All widths and transformers take turns, so that a machine that slows down slows them all; medians.
The last line of output with --json is one object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from anydraft.backends import torch_hf
from anydraft.backends.torch_loading import locate

WIDTHS = (1, 2, 4, 8)


def our_pass(model: torch_hf.TorchModel, ids: list[int]) -> Callable[[int], float]:
    """width -> seconds of one pass over that many rows, all with logits, after `ids`."""
    state = model.new_state()
    model.extend([(state, ids, 0)])

    def run(width: int) -> float:
        start = time.perf_counter()
        model.extend([(state, ids[:width], width)])
        seconds = time.perf_counter() - start
        state.rollback(len(ids))
        return seconds

    return run


def stock_pass(path: str, ids: list[int]) -> Callable[[], float]:
    """() -> seconds of transformers' one-row pass (sdpa, float32) after `ids`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def run() -> float:
        start = time.perf_counter()
        model(input_ids=torch.tensor([ids[:1]]), cache=cache, use_cache=True)
        seconds = time.perf_counter() - start
        cache.crop(-1)
        return seconds

    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that --json prints."""
    source = locate(args.model)
    model = torch_hf.load(source.path, device="cpu", dtype="float32", threads=args.threads)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.vocab_size, (args.context,), generator=generator).tolist()
    ours, stock = our_pass(model, ids), stock_pass(str(source.path), ids)
    turns: dict[str, Callable[[], float]] = {
        str(width): lambda width=width: ours(width)  # type: ignore[misc]
        for width in WIDTHS
    }
    turns["transformers"] = stock
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    end = time.perf_counter() + args.seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 4:
        for name, turn in turns.items():
            turn()  # the one before it left the caches to somebody else
            seconds[name].append(turn())
        rounds += 1
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "v": {str(width): round(median[str(width)] / median["1"], 3) for width in WIDTHS},
        "rows1_vs_transformers1": round(median["1"] / median["transformers"], 3),
        "rows4_vs_transformers1": round(median["4"] / median["transformers"], 3),
        "rows8_vs_transformers1": round(median["8"] / median["transformers"], 3),
        "milliseconds": {name: round(value * 1e3, 2) for name, value in median.items()},
        "rounds": rounds,
        "context": args.context,
        "model": str(args.model),
        "width_exact": model.width_exact,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(
                line.split(":")[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    return {
        "cpu": name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma3-270m", help="folder, pulled name or hub id")
    parser.add_argument("--context", type=int, default=256, help="tokens before the pass")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to measure for")
    parser.add_argument("--quick", action="store_true", help="measure for half as long")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.quick:
        args.seconds /= 2
    result = measure(args)
    out = sys.stderr if args.json else sys.stdout
    for width, cost in result["v"].items():
        print(f"v({width}) = {cost:.2f}   {result['milliseconds'][width]:8.2f} ms", file=out)
    print(f"transformers, one row: {result['milliseconds']['transformers']:.2f} ms", file=out)
    for rows in (1, 4, 8):
        print(f"{rows} rows / that: {result[f'rows{rows}_vs_transformers1']:.2f}", file=out)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
