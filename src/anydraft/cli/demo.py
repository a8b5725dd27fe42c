"""`anydraft demo`: plain and drafted decoding side by side, measured."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from anydraft.cli import common, render
from anydraft.cli.demo_cases import ACROSS, CASES, Case
from anydraft.errors import ModelNotFoundError, RequestError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from anydraft.engine import Chunk, Engine, Generation, GenerationRequest
    from anydraft.identity import IdentityReport

PLAIN, DRAFTED = 0, 1
SLOW = 20.0  # seconds for one plain and one drafted run; beyond, they are not repeated


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("demo")(demo)


def demo(
    target: Annotated[str, typer.Option(help="The model whose words come out.")] = "gemma3-270m",
    draft: Annotated[str, typer.Option(help="The model that drafts.")] = "smollm2-135m",
    draft_dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or int4, for the draft alone.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="At most so many tokens per run, instead of 64 or 128.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Runs of each kind per case; slow cases run once.")
    ] = 2,
) -> None:
    """Generate plain and drafted, side by side, and compare speed and tokens.

    Three cases: a draft from another vendor with another tokenizer; lookup on a text that repeats;
    and sampling with a seed. Where llama-cpp-python is installed there is a fourth: the first one
    with the draft in llama.cpp and the target in PyTorch. Plain and drafted runs take turns, each
    alone on the machine. What is measured is printed, also where drafting is slower. Exit code 1 if
    any token differs.
    """
    if repeats < 1 or (max_tokens is not None and max_tokens < 1):
        raise RequestError("--repeats and --max-tokens must be at least 1")
    _have(target, draft)
    from rich.console import Console

    console = Console(highlight=False)
    options = common.ModelOptions(target=target, draft=draft, draft_dtype=draft_dtype)
    render.note(f"loading {target} and {draft} …")
    with common.load_engine(options) as engine:
        console.print(_setting(engine, target, draft), style="dim", soft_wrap=True)
        results = []
        cases = [*CASES, ACROSS] if _can_cross(engine, draft) else CASES
        for number, case in enumerate(cases, start=1):
            title = f"{number}. {case.title}"
            engines = [engine.plain(), _drafting(engine, draft, case)]
            screen = _screen(console, engine, title, case)
            results.append(_measure(engines, case, screen, max_tokens, repeats))
        console.print(_table(results))
        for result in results:
            if not result.report.identical:
                console.print(f"{result.case.title}: {result.report.summary()}", soft_wrap=True)
    raise typer.Exit(0 if all(result.report.passed for result in results) else 1)


def _have(*names: str) -> None:
    """See that models of the catalogue are there; on a terminal, offer to fetch them."""
    from anydraft import store
    from anydraft.store_catalogue import CATALOGUE

    missing = [m.name for m in store.list_models() if m.name in names and m.state != "ready"]
    missing = [name for name in missing if name in CATALOGUE and not Path(name).is_dir()]
    if not missing:
        return
    command = f"anydraft pull {' '.join(missing)}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        size = store.readable_size(sum(CATALOGUE[name].folder_size for name in missing))
        question = f"{' and '.join(missing)} must be fetched first ({size} on disk). Fetch now?"
        if typer.confirm(question, default=True, err=True):
            for name in missing:
                store.pull(name)
            return
    raise ModelNotFoundError(f"the demo needs {' and '.join(missing)}: run `{command}`")


def _can_cross(engine: Engine, draft: str) -> bool:
    """Whether the draft model can be run by llama.cpp beside a target that is not."""
    from anydraft.errors import AnydraftError
    from anydraft.store_gguf import resolve_gguf

    if engine.target.runtime == ACROSS.runtime or find_spec("llama_cpp") is None:
        return False
    try:
        resolve_gguf(draft)
    except AnydraftError:
        return False
    return True


def _drafting(engine: Engine, draft: str, case: Case) -> Engine:
    """The case's way of drafting for the one target that is loaded."""
    from anydraft.engine import load

    if case.runtime:
        return load(engine.target, draft, draft_options={"runtime": case.runtime})
    if case.lookup:
        return load(engine.target, "lookup")
    return engine


# --- measuring ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """The runs of one case, and whether the drafted one said what the plain one did."""

    case: Case
    draft: str
    runs: list[list[Generation]]
    report: IdentityReport

    def speed(self, side: int) -> float:
        """Tokens per second over all runs of one side, after the prompt's pass."""
        return harmonic_mean([run.stats.tokens_per_second for run in self.runs[side]])


def _measure(
    engines: Sequence[Engine], case: Case, screen: Screen, max_tokens: int | None, repeats: int
) -> Result:
    """Run plain and drafted in turns, each alone; the second time in the other order."""
    from anydraft.engine import GenerationRequest
    from anydraft.identity import compare_with_plain

    drafter = engines[DRAFTED].drafter
    request = GenerationRequest(
        prompt=case.prompt,
        max_tokens=min(max_tokens or case.max_tokens, 4096),
        num_draft_tokens=case.num_draft_tokens,
        **case.fields,
    )
    runs: list[list[Generation]] = [[], []]
    with screen:
        for engine in engines:  # first passes also pay for memory; nobody waits for them twice
            engine.generate(case.prompt, max_tokens=4, num_draft_tokens=case.num_draft_tokens)
        started = time.perf_counter()
        for repeat in range(repeats):
            for side in (PLAIN, DRAFTED) if repeat % 2 == 0 else (DRAFTED, PLAIN):
                runs[side].append(_run(engines[side], request, screen, side))
            if time.perf_counter() - started > SLOW:
                break
    report = compare_with_plain(engines[PLAIN], runs[DRAFTED][0], request, runs[PLAIN][0])
    for drafted in runs[DRAFTED][1:]:
        if report.identical:
            report = compare_with_plain(engines[PLAIN], drafted, request, runs[PLAIN][0])
    return Result(case, drafter.name if drafter else "none", runs, report)


def _run(engine: Engine, request: GenerationRequest, screen: Screen, side: int) -> Generation:
    from anydraft.engine import fold

    chunks: list[Chunk] = []
    screen.begin(side)
    for chunk in engine.stream(**common.as_fields(request)):
        chunks.append(chunk)
        screen.show(side, chunk)
    generation = fold(chunks, [request.seed])[0]
    screen.end(side, generation)
    return generation


# --- showing --------------------------------------------------------------------------------------


class Screen(Protocol):
    """Where the runs of a case appear. Nothing is drawn while a pass is being timed."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def begin(self, side: int) -> None: ...
    def show(self, side: int, chunk: Chunk) -> None: ...
    def end(self, side: int, generation: Generation) -> None: ...


def _screen(console: Console, engine: Engine, title: str, case: Case) -> Screen:
    kind = Panels if console.is_terminal else Lines
    return kind(console, engine, title, case)


def _side(side: int, case: Case, generation: Generation | None = None) -> str:
    name = f"drafted, K = {case.num_draft_tokens}" if side == DRAFTED else "plain"
    if generation is None:
        return name
    return f"{name}: {generation.stats.tokens_per_second:.1f} tokens/s"


def _prompt_end(case: Case) -> str:
    *before, last = case.prompt.rstrip().splitlines()
    return f"prompt: {'… ' if before else ''}{last}"


@dataclass(slots=True, eq=False)
class Lines:
    """For pipes and files: each run's speed, and the text once."""

    console: Console
    engine: Engine
    title: str
    case: Case
    shown: bool = False

    def __enter__(self) -> None:
        self._print(f"\n== {self.title}\n")
        self._print(_prompt_end(self.case))

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, side: int) -> None:
        pass

    def show(self, side: int, chunk: Chunk) -> None:
        pass

    def end(self, side: int, generation: Generation) -> None:
        if not self.shown:
            self._print(generation.text.strip("\n"))
        self.shown = True
        self._print(f"[{_side(side, self.case, generation)}, {len(generation.token_ids)} tokens]")

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


@dataclass(slots=True, eq=False)
class Panels:
    """For terminals: two panels that fill as the tokens come, the draft's tokens in green."""

    console: Console
    engine: Engine
    title: str
    case: Case
    pieces: list[list[tuple[str, str]]] = field(default_factory=lambda: [[], []])
    labels: list[str] = field(init=False)
    spans: list[render.DraftSpans] = field(init=False)
    live: Live = field(init=False)

    def __post_init__(self) -> None:
        from rich.live import Live

        self.labels = [_side(side, self.case) for side in (PLAIN, DRAFTED)]
        self.spans = [render.DraftSpans(self.engine.vocabulary) for _ in self.labels]
        # Without a thread of its own: drawing must not run beside a pass.
        self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> None:
        self.live.start()
        self._draw()

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def begin(self, side: int) -> None:
        self.pieces[side] = []
        self.spans[side] = render.DraftSpans(self.engine.vocabulary)
        self._draw()

    def show(self, side: int, chunk: Chunk) -> None:
        for text, drafted in self.spans[side].split(chunk):
            self.pieces[side].append((render.visible(text), "green" if drafted else ""))
        self._draw()

    def end(self, side: int, generation: Generation) -> None:
        self.labels[side] = _side(side, self.case, generation)
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(expand=True, padding=0)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(self._panel(PLAIN), self._panel(DRAFTED))
        prompt = Text(_prompt_end(self.case), style="dim", no_wrap=True, overflow="ellipsis")
        self.live.update(Group(Rule(self.title, align="left"), prompt, grid), refresh=True)

    def _panel(self, side: int) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

        height = max(4, min(16, self.console.height - 6))
        width = max(10, self.console.width // 2 - 4)
        text = Text.assemble(*self.pieces[side]) if self.pieces[side] else Text(" ")
        lines = text.wrap(self.console, width)
        body = Text("\n").join(lines[-height:])
        return Panel(body, title=self.labels[side], title_align="left", height=height + 2)


def _setting(engine: Engine, target: str, draft: str) -> str:
    """What the numbers were measured on."""
    import psutil
    import torch

    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    lines = [f"{_cpu_name()}, {cores} cores, {torch.get_num_threads()} threads"]
    models = (engine.target, getattr(engine.drafter, "model", None))
    for role, name, model in zip(("target", "draft"), (target, draft), models, strict=True):
        dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
        lines.append(f"{role} {name}: {_weights(name, dtype)}")
    return "\n".join(lines)


def _weights(name: str, dtype: str) -> str:
    from anydraft import store
    from anydraft.errors import AnydraftError

    try:
        note = str(
            store.describe(store.resolve(name)).get("weights", "weights as its files have them")
        )
    except AnydraftError:
        note = "weights as its files have them"
    return f"{note}, held as {dtype}" if dtype else note


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def _table(results: Sequence[Result]) -> RenderableType:
    """One column per case, so that it fits 80 characters."""
    from rich.table import Table

    table = Table(
        title="\nmeasured here, in tokens/s after the prompt's pass", title_justify="left"
    )
    table.add_column("")
    for result in results:
        table.add_column(result.case.title, justify="left")

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    row("draft", [f"{r.draft}, K = {r.case.num_draft_tokens}" for r in results])
    row("plain", [f"{r.speed(PLAIN):.1f} tokens/s" for r in results])
    row("drafted", [f"{r.speed(DRAFTED):.1f} tokens/s" for r in results])
    row("speed-up", [_ratio(r) for r in results])
    stats = [r.runs[DRAFTED][0].stats for r in results]
    row("tokens per round", [f"{s.tokens_per_round:.2f}" for s in stats])
    row("acceptance by position", [render.acceptance(s.acceptance, 8) or "none" for s in stats])
    row("tokens", [str(s.generated_tokens) for s in stats])
    row("identical", [_verdict(r.report) for r in results])
    return table


def _ratio(result: Result) -> str:
    plain, drafted = result.speed(PLAIN), result.speed(DRAFTED)
    if not plain:
        return "too short to tell"
    return f"{drafted / plain:.2f}x" + ("" if drafted >= plain else " (slower)")


def _verdict(report: IdentityReport) -> str:
    if report.identical:
        return "yes"
    return "no, a near-tie" if report.passed else "NO"
