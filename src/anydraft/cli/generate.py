"""`anydraft generate`: one prompt in, its answer out as it comes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydraft.cli import common, render
from anydraft.errors import AnydraftError, RequestError

if TYPE_CHECKING:
    from anydraft.engine import Engine, Generation, GenerationRequest
    from anydraft.identity import IdentityReport
    from anydraft.sampling import SamplingParams


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("generate")(generate)


@common.with_options(
    models=common.ModelOptions, sampling=common.SamplingOptions, output=common.OutputOptions
)
def generate(
    models: common.ModelOptions,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="A file with the prompt; - is standard input.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message; the prompt becomes a chat message.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Put the prompt into the chat template, or not (default)."
        ),
    ] = None,
    sampling: common.SamplingOptions = common.SamplingOptions(),  # noqa: B008
    n: Annotated[int, typer.Option("--n", help="How many answers.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities, with so many alternatives per token."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")
    ] = False,
    verify_plain: Annotated[
        bool,
        typer.Option(
            "--verify-plain",
            help="Run the same request without the draft, and exit with 1 if the tokens differ.",
        ),
    ] = False,
    output: common.OutputOptions = common.OutputOptions(),  # noqa: B008
) -> None:
    """Continue a prompt; with --draft, faster and with the same tokens.

    The prompt is --prompt, --prompt-file, or what is piped in (of a file or pipe, one line end at
    the very end is dropped). It is continued as it is, by instruct models too, unless --chat or
    --system asks for the chat template. The answer goes to stdout as it comes, statistics go to
    stderr.

    Ctrl-C ends the answer and keeps it (exit code 130).
    """
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs goes with --json")
    if verify_plain and models.draft is None:
        raise RequestError("--verify-plain compares with plain decoding: give a --draft")
    color = render.use_color(output.color, sys.stdout)
    fields = _prompt_fields(prompt, prompt_file, system, chat)
    fields |= sampling.request_fields() | {"n": n, "logprobs": logprobs}
    if models.num_draft_tokens is not None:
        fields["num_draft_tokens"] = models.draft_length()
    request = _request(fields)  # before anything is loaded
    with common.load_engine(models) as engine:
        method = engine.method_for(request.sampling())
        if verify_plain and method.guarantee != "seed":
            raise RequestError(
                f"--verify-plain compares tokens under one seed, and {method} is {method.label}: "
                "leave out --guarantee and --method, or test laws with `anydraft verify`"
            )
        common.know_costs(engine, sampled=request.temperature > 0, quiet=output.quiet)
        if not output.quiet:
            _say_before(engine, request)
        printer = None
        if not as_json:
            printer = render.AnswerPrinter(
                sys.stdout, engine.vocabulary, show_draft=output.show_draft and color, count=n
            )
        run = _run(engine, fields, printer)
        if not output.quiet:
            _say_after(run, models.draft, request)
        if verify_plain:
            run.verify(engine, request)
            for line in run.verdicts():
                render.note(line)
        if as_json:
            result = run.fields(engine, from_draft=output.show_draft)
            result |= {"method": str(method), "guarantee": method.guarantee}
            print(json.dumps(result), flush=True)
        raise typer.Exit(run.exit_code)


def _prompt_fields(
    prompt: str | None, prompt_file: str | None, system: str | None, chat: bool | None
) -> dict[str, Any]:
    if chat is False and system is not None:
        raise RequestError("--system goes through the chat template, and --raw forbids it")
    data = _read_prompt(prompt, prompt_file)
    if not chat and system is None:
        return {"prompt": data}
    try:
        content = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"a chat message must be UTF-8 text; the prompt is not: {error}"
        ) from None
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def _read_prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    if prompt is not None:
        if prompt_file is not None:
            raise RequestError("give either --prompt or --prompt-file")
        return os.fsencode(prompt)
    if prompt_file is None and sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe text in")
    try:
        if prompt_file is None or prompt_file == "-":
            data = sys.stdin.buffer.read()
        else:
            data = Path(prompt_file).expanduser().read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read the prompt file {prompt_file}: {error.strerror}") from None
    return data.removesuffix(b"\n").removesuffix(b"\r")


def _request(fields: dict[str, Any]) -> GenerationRequest:
    from anydraft.engine import GenerationRequest

    return GenerationRequest(**fields)


def _say_before(engine: Engine, request: GenerationRequest) -> None:
    if request.prompt == b"" and engine.encode(request):  # which may refuse it
        render.note("note: the prompt is empty; the model begins at its start token")
    if not engine.vocabulary.eos_ids and not request.stop:
        render.note(
            f"note: {engine.target.name} has no end token; the answer ends at --max-tokens "
            f"({request.max_tokens})"
        )
    say_method(engine, request.sampling())


def say_method(engine: Engine, sampling: SamplingParams) -> None:
    """Name the method and its guarantee where there was something to choose."""
    chosen = engine.fixed_method is not None or engine.guarantee == "distribution"
    if not chosen or sampling.greedy or engine.drafter is None:
        return
    method = engine.method_for(sampling)
    why = "" if engine.fixed_method else f": {engine.choice_for(sampling).reason}"
    render.note(f"method: {method}, {method.label}{why}")


def _say_after(run: _Run, draft: str | None, request: GenerationRequest) -> None:
    if run.interrupted:
        render.note("interrupted; the answer so far is kept")
    for line in render.stats_lines([a.stats for a in run.answers], draft=draft):
        render.note(line)
    if request.temperature:
        render.note(f"seed: {request.seed}")


@dataclass(slots=True)
class _Run:
    answers: list[Generation]
    interrupted: bool
    reports: Sequence[IdentityReport] | None = None
    plain: Sequence[Generation] = ()

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return 130
        return 0 if all(report.passed for report in self.reports or ()) else 1

    def verify(self, engine: Engine, request: GenerationRequest) -> None:
        """Compare with the same request without the draft. Ctrl-C leaves it undecided."""
        from anydraft.identity import compare_with_plain

        if self.interrupted:
            return
        try:
            with common.interruptible() as cancelled:
                plain = _collect(engine.plain(), common.as_fields(request), None, cancelled)
            if cancelled():
                raise KeyboardInterrupt
            self.reports = [
                compare_with_plain(engine, answer, request, alone)
                for answer, alone in zip(self.answers, plain, strict=True)
            ]
            self.plain = plain
        except KeyboardInterrupt:
            self.interrupted = True

    def verdicts(self) -> list[str]:
        """What the comparison found, for people."""
        if self.reports is None:
            return ["verify: interrupted, so not compared with plain decoding"]
        lines = []
        for number, report in enumerate(self.reports, start=1):
            which = f" [{number}]" if len(self.reports) > 1 else ""
            lines.append(f"verify{which}: {report.summary()}")
        drafted, plain = (
            render.add_up([answer.stats for answer in answers]).tokens_per_second
            for answers in (self.answers, self.plain)
        )
        if plain:
            lines.append(
                f"plain decoding: {plain:.1f} tokens/s, with the draft {drafted:.1f}: "
                f"{drafted / plain:.2f}x"
            )
        return lines

    def fields(self, engine: Engine, *, from_draft: bool) -> dict[str, Any]:
        """The one JSON object."""
        choices = [
            render.generation_fields(answer, engine.vocabulary, from_draft=from_draft)
            for answer in self.answers
        ]
        result = dict(choices[0])
        if len(choices) > 1:
            result["choices"] = choices
        if self.reports is not None:
            reports = [
                {"identical": r.identical, "passed": r.passed, "summary": r.summary()}
                for r in self.reports
            ]
            result["verify_plain"] = reports if len(reports) > 1 else reports[0]
        return result


def _run(engine: Engine, fields: dict[str, Any], printer: render.AnswerPrinter | None) -> _Run:
    with common.interruptible() as cancelled:
        answers = _collect(engine, fields, printer, cancelled)
    return _Run(answers, any(answer.finish_reason == "interrupted" for answer in answers))


def _collect(
    engine: Engine,
    fields: dict[str, Any],
    printer: render.AnswerPrinter | None,
    cancelled: common.Interrupt,
) -> list[Generation]:
    """Generate, showing what comes. A second Ctrl-C ends it at once, without the last round."""
    from anydraft.engine import Chunk, fold

    chunks = []
    try:
        for chunk in engine.stream(cancelled=cancelled, **fields):
            chunks.append(chunk)
            if printer is not None:
                printer.push(chunk)
    except (KeyboardInterrupt, AnydraftError) as error:
        if printer is not None:
            printer.abandon()
        if isinstance(error, AnydraftError):
            raise
    for choice in set(range(fields["n"])) - {chunk.choice for chunk in chunks}:
        chunks.append(Chunk((), "", None, (), 0, choice))  # nothing came before the second Ctrl-C
    return fold(chunks, [fields["seed"]] * fields["n"])
