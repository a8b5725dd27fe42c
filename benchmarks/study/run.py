"""The study: five pairs at K = 0..8, verification parallel and serial, lookup on two kinds of text.

Every configuration has its own file in `results/`, which `anydraft report` shows and `check.py`
reads. Predictions come first, from the costs of passes and from prompts that are not measured
afterwards; then all K take turns on every prompt. What is finished is kept: run it again and it
goes on where it was.

    python benchmarks/study/run.py                          all of it, about 25 minutes on two cores
    python benchmarks/study/run.py --config gemma_smollm2   one configuration
    python benchmarks/study/run.py --torch-only             pairs in PyTorch alone: no llama.cpp
    python benchmarks/study/run.py --fresh                  measure again what is there
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from configurations import CONFIGURATIONS, Configuration, by_name, loader

from anydraft.errors import AnydraftError
from anydraft.measure import bench, bench_results

RESULTS = Path(__file__).parent / "results"


class Lines:
    """What is being done, at most a line in fifteen seconds."""

    def __init__(self) -> None:
        self._said = 0.0
        self._total = self._done = 0

    def start(self, total: int, done: int) -> None:
        self._total, self._done = total, done

    def say(self, message: str) -> None:
        if time.monotonic() - self._said > 15:
            self._said = time.monotonic()
            print(f"  {self._done} of {self._total} runs: {message}", file=sys.stderr, flush=True)

    def advance(self, runs: int) -> None:
        self._done += runs


def folder(torch_only: bool, quick: bool) -> Path:
    """Where results go: those of the study itself lie apart from all others."""
    if quick:
        return RESULTS / "quick"
    return RESULTS / "torch_only" if torch_only else RESULTS


def measure(configuration: Configuration, path: Path, torch_only: bool, quick: bool) -> bool:
    """Begin or go on with a configuration; whether it is complete then.

    Raises:
        AnydraftError: a model cannot be loaded, or the results cannot be read or written.
    """
    if path.exists():
        results = bench_results.read(path)
        if results["complete"]:
            return True
        plan, _ = bench.continue_(results)
    else:
        plan = configuration.plan(torch_only, quick)
        results = bench.begin(plan)
    return bench.run(
        plan,
        results,
        lambda found: bench_results.write(path, found),
        load=loader(configuration),
        progress=Lines(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="append", help="one of them by name; may be repeated")
    parser.add_argument("--torch-only", action="store_true", help="pairs in PyTorch alone")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--quick", action="store_true", help="two prompts and K: does it run?")
    parser.add_argument("--list", action="store_true", help="the configurations, and leave")
    args = parser.parse_args()
    try:
        chosen = [by_name(n) for n in args.config] if args.config else list(CONFIGURATIONS)
    except LookupError as error:
        parser.error(str(error))
    if args.list:
        print("\n".join(f"{c.name:22} {c.title}" for c in chosen))
        return 0
    where = folder(args.torch_only, args.quick)
    where.mkdir(parents=True, exist_ok=True)
    failed = 0
    for configuration in chosen:
        failed += not _one(configuration, where / f"{configuration.name}.json", args)
    return 1 if failed else 0


def _one(configuration: Configuration, path: Path, args: argparse.Namespace) -> bool:
    if args.torch_only and configuration.torch_pair is None:
        print(f"{configuration.name}: left out, it needs llama.cpp")
        return True
    if args.fresh or args.quick:
        path.unlink(missing_ok=True)
    print(f"{configuration.name}: {configuration.title}", flush=True)
    started = time.monotonic()
    try:
        measure(configuration, path, args.torch_only, args.quick)
    except AnydraftError as error:
        print(f"  cannot be measured: {error}", flush=True)
        return False
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was finished is in {path}. The same command goes on.")
        raise SystemExit(130) from None
    print(f"  {path} ({time.monotonic() - started:.0f} s)", flush=True)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
