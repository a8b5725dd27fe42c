"""`anydraft bench`: speed against plain decoding over kinds of text, kept in a file as it goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from anydraft.cli import common, render
from anydraft.errors import RequestError

if TYPE_CHECKING:
    from anydraft.measure.bench import Progress
    from anydraft.measure.bench_plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("bench")(bench)


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Which models; each target is paired with each draft."""

    target: Annotated[
        list[str] | None, typer.Option(help="A model whose words come out; may be repeated.")
    ] = None
    draft: Annotated[
        list[str] | None, typer.Option(help="A draft, or 'lookup'; may be repeated.")
    ] = None
    num_draft_tokens: Annotated[
        str, typer.Option(help="Draft lengths, e.g. 1,2,4 or 1-8 or 2,4,auto.")
    ] = "1,2,3,4,6,8,auto"


def _how_models_run() -> type:
    """The options of `generate` that say how models run, as a group of their own."""
    hints = get_type_hints(common.ModelOptions, include_extras=True)
    # What the benchmark varies itself, and how one draft drafts, are not among them.
    own = {field.name for field in fields(PairOptions)} | {"method", "guarantee"}
    own |= {f"draft_{name}" for name in ("temperature", "min_confidence", "max_entropy")}
    own.add("draft_vocabulary")
    rest = [f for f in fields(common.ModelOptions) if f.name not in own]
    return make_dataclass(
        "BackendOptions", [(f.name, hints[f.name], f.default) for f in rest], frozen=True
    )


BackendOptions = _how_models_run()


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Over which text, how long, how often."""

    kinds: Annotated[
        str | None, typer.Option(help="Kinds of prompts, with commas between (default: all eight).")
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(help="Your own prompts: text, JSON lines, or Spec-Bench's or SPEED-Bench's."),
    ] = None
    limit: Annotated[int | None, typer.Option(help="At most so many prompts of each kind.")] = None
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Chat template or not (default: where there is one)."),
    ] = None
    max_tokens: Annotated[int, typer.Option(help="At most so many tokens per answer.")] = 64
    sampling: Annotated[
        list[str] | None,
        typer.Option(help="greedy (default), or e.g. temperature=0.7,top_p=0.9; may be repeated."),
    ] = None
    method: Annotated[
        list[str] | None, typer.Option(help="How drafts are verified; may be repeated.")
    ] = None
    repeats: Annotated[int, typer.Option(help="Times that every prompt is gone through.")] = 1
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 1
    native: Annotated[
        str,
        typer.Option(help="The runtime's own generation: plain, all (also with the draft), none."),
    ] = "plain"
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Predict every speed beforehand.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Where results go."""

    output: Annotated[str, typer.Option(help="The result file.")] = "bench.json"
    csv: Annotated[str | None, typer.Option(help="Also one CSV line per run, here.")] = None
    parquet: Annotated[str | None, typer.Option(help="Also one Parquet row per run, here.")] = None
    resume: Annotated[
        str | None, typer.Option(help="Go on with this result file, by the plan in it.")
    ] = None


@common.with_options(pairs=PairOptions, work=WorkOptions, backend=BackendOptions, files=FileOptions)
def bench(
    pairs: PairOptions,
    work: WorkOptions,
    backend: Any,
    files: FileOptions,
    as_json: Annotated[bool, typer.Option("--json", help="The cells as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure how fast drafting is against plain decoding, and whether it says the same.

    All contenders take turns on every prompt. The result file is up to date after each prompt:
    Ctrl-C keeps what is finished, --resume FILE goes on. `anydraft report FILE` shows it.
    """
    if files.parquet is not None:
        from anydraft.measure.bench_results import need_pyarrow

        need_pyarrow("to write Parquet")
    path = files.resume or files.output
    if files.resume is None:
        plan, results = _begin(pairs, backend, work, path)
    else:
        plan, results = _continue(pairs, path)
    complete = _measure(plan, results, path, quiet)
    if skipped := sum(1 for run in results["runs"] if run.get("skipped")):
        was = "prompt was" if skipped == 1 else "prompts were"
        render.note(f"{skipped} {was} skipped: too long for the target's context")
    _tables(results, files)
    if as_json:
        print(json.dumps({"complete": complete, "file": path, "cells": results["cells"]}))
    else:
        print(summary(results))
    if not complete:
        render.note(_interrupted(path))
        raise typer.Exit(130)
    render.note(f"results: {path}. Show them: anydraft report {path}")
    if any(cell["identity"].get("violation") for cell in results["cells"]):
        raise typer.Exit(1)


def _begin(
    given: PairOptions, backend: Any, work: WorkOptions, path: str
) -> tuple[Plan, dict[str, Any]]:
    from anydraft.measure import bench_plan, bench_results
    from anydraft.measure.bench import begin

    bench_results.check_writable(path)
    if not given.target:
        raise RequestError("give at least one --target, or --resume FILE")
    options = common.target_options(backend)
    drafts: list[str | None] = list(given.draft or []) or [None]
    pairs = [
        bench_plan.PairSpec(target, draft, options, common.draft_options(backend, draft))
        for target in given.target
        for draft in drafts
    ]
    plan = bench_plan.Plan(
        pairs=tuple(pairs),
        num_draft_tokens=bench_plan.parse_lengths(given.num_draft_tokens),
        methods=tuple(work.method or (bench_plan.SEED_IDENTICAL,)),
        sampling=tuple(work.sampling or ("greedy",)),
        max_tokens=work.max_tokens,
        repeats=work.repeats,
        seed=work.seed,
        native=work.native,
        chat=work.chat,
        predict=work.predict,
        kinds=None if work.kinds is None else tuple(k.strip() for k in work.kinds.split(",")),
        prompt_file=work.prompts,
        limit=work.limit,
    )
    return plan, begin(plan)


def _continue(given: PairOptions, path: str) -> tuple[Plan, dict[str, Any]]:
    from anydraft.measure import bench_results
    from anydraft.measure.bench import continue_

    if given.target or given.draft:
        raise RequestError(
            "--resume takes the models from the file: leave --target and --draft out"
        )
    results = bench_results.read(path)
    plan, changed = continue_(results)
    for line in changed:
        render.note(f"note: this benchmark began elsewhere or otherwise: {line}")
    return plan, results


def _measure(plan: Plan, results: dict[str, Any], path: str, quiet: bool) -> bool:
    from anydraft.measure import bench, bench_results

    common.one_line_warnings()
    with common.interruptible() as cancelled, _progress(quiet) as progress:
        try:
            return bench.run(
                plan,
                results,
                lambda found: bench_results.write(path, found),
                progress=progress,
                cancelled=cancelled,
            )
        except KeyboardInterrupt:
            return False


def _interrupted(path: str) -> str:
    if not Path(path).expanduser().exists():
        return "interrupted before anything was finished"
    return f"interrupted; what was finished is in {path}. Go on: anydraft bench --resume {path}"


def _tables(results: Mapping[str, Any], files: FileOptions) -> None:
    from anydraft.measure import bench_results

    if files.csv is not None:
        bench_results.write_csv(files.csv, results)
    if files.parquet is not None:
        bench_results.write_parquet(files.parquet, results)


# --- what is shown --------------------------------------------------------------------------------


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar with the time left on a terminal, else a line now and then."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _Bar() as bar:
            yield bar
    else:
        yield _Lines()


class _Bar:
    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("runs, left:"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, total: int, done: int) -> None:
        self._bar.update(self._task, total=total, completed=done)

    def say(self, message: str) -> None:
        self._bar.update(self._task, description=render.visible(message))

    def advance(self, runs: int) -> None:
        self._bar.advance(self._task, runs)


class _Lines:
    """At most one line in ten seconds."""

    def __init__(self) -> None:
        self._total = self._done = self._before = 0
        self._began = self._said = 0.0
        self._message = ""

    def start(self, total: int, done: int) -> None:
        self._total, self._done, self._before = total, done, done
        self._began = time.monotonic()

    def say(self, message: str) -> None:
        self._message = message
        now = time.monotonic()
        if now - self._said < 10:
            return
        self._said = now
        new = self._done - self._before
        left = (now - self._began) / new * (self._total - self._done) if new else None
        rest = "" if left is None else f", about {_duration(left)} left"
        render.note(f"{self._done} of {self._total} runs{rest}: {render.visible(message)}")

    def advance(self, runs: int) -> None:
        self._done += runs


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def summary(results: Mapping[str, Any]) -> str:
    """The cells as a table for the terminal."""
    lines = [
        f"{'':24}{'tokens/s':>10}{'speed-up':>10}{'95 % interval':>16}{'tokens/round':>14}"
        f"{'accepted first':>16}{'same tokens':>13}"
    ]
    heading = None
    for cell in results["cells"]:
        title = f"{cell['pair']}, {cell['sampling']}"
        if title != heading:
            lines += ["", title]
            heading = title
        lines.append(_line(cell))
    return render.visible("\n".join(lines))


def _line(cell: Mapping[str, Any]) -> str:
    from anydraft.measure.bench_plan import Contender

    name = str(Contender(cell["contender"], cell["method"], cell["num_draft_tokens"]))
    speedup = cell["speedup"]
    ratio, interval = "", ""
    if speedup is not None and cell["contender"] != "plain":
        ratio = f"{speedup['geometric_mean']:.2f}x"
        interval = f"{speedup['low']:.2f} to {speedup['high']:.2f}"
    rate, per_round = cell["tokens_per_second"], cell["tokens_per_round"]
    first = f"{cell['acceptance'][0]:.2f}" if cell["acceptance"] else ""
    identity = cell["identity"]
    same = f"{identity.get('identical', 0)} of {sum(identity.values())}" if identity else ""
    return (
        f"  {name:22}{'' if rate is None else f'{rate:.1f}':>10}{ratio:>10}{interval:>16}"
        f"{'' if per_round is None else f'{per_round:.2f}':>14}{first:>16}{same:>13}"
    )
