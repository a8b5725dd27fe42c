"""`anydraft chat`: a conversation whose KV is kept from one turn to the next."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydraft.cli import common, render
from anydraft.cli.generate import say_method
from anydraft.errors import AnydraftError, PromptTooLongError, RequestError

if TYPE_CHECKING:
    from anydraft.engine import Conversation, Engine, GenerationRequest
    from anydraft.stats import Stats

HELP = """\
/system TEXT   say how the model is to behave; without TEXT: show it
/stats         statistics of the conversation
/save FILE     write the conversation to FILE as JSON
/reset         begin anew; the system message stays
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer and keeps what there is of it."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("chat")(chat)


@common.with_options(
    models=common.ModelOptions, sampling=common.SamplingOptions, output=common.OutputOptions
)
def chat(
    models: common.ModelOptions,
    system: Annotated[
        str | None, typer.Option(help="A system message: how the model is to behave.")
    ] = None,
    sampling: common.SamplingOptions = common.SamplingOptions(),  # noqa: B008
    output: common.OutputOptions = common.OutputOptions(),  # noqa: B008
) -> None:
    """Talk to an instruct model; each line is a message, /help lists commands.

    What the models have read stays in memory from turn to turn. Each sees the conversation in its
    own chat template. Lines may also be piped in.
    """
    color = output.show_draft and render.use_color(output.color, sys.stdout)
    fields = sampling.request_fields()
    if models.num_draft_tokens is not None:
        fields["num_draft_tokens"] = models.draft_length()
    _check(fields)  # before anything is loaded
    with common.load_engine(models) as engine:
        if engine.vocabulary.chat_template is None:
            raise RequestError(
                f"{models.target} has no chat template, so there is no telling how it wants to be "
                "talked to: take an instruct model as the target, or `anydraft generate`, which "
                "continues text"
            )
        law = _check(fields).sampling()
        common.know_costs(engine, sampled=not law.greedy, quiet=output.quiet)
        if not output.quiet:
            say_method(engine, law)
        repl = Repl(engine, fields, models.draft, system, show_draft=color, quiet=output.quiet)
        repl.run()


def _check(fields: dict[str, Any]) -> GenerationRequest:
    from anydraft.engine import GenerationRequest

    return GenerationRequest(messages=(), **fields)


@dataclass(slots=True)
class Turn:
    """A question and its answer."""

    user: str
    assistant: str

    def messages(self) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": self.user},
            {"role": "assistant", "content": self.assistant},
        ]


@dataclass(slots=True, eq=False)
class Repl:
    """The conversation, and what its commands do.

    Attributes:
        turns: everything said since the last /reset.
        first: index of the oldest turn that the model still sees.
    """

    engine: Engine
    fields: dict[str, Any]
    draft: str | None
    system: str | None
    show_draft: bool
    quiet: bool
    turns: list[Turn] = field(default_factory=list)
    first: int = 0
    stats: list[Stats] = field(default_factory=list)
    conversation: Conversation = field(init=False)

    def __post_init__(self) -> None:
        from anydraft.engine import Conversation

        self.conversation = Conversation()

    def run(self) -> None:
        """Read lines until there are no more."""
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  (input() then has editing and history)

            self._note(f"{self.engine.target.name} is listening; /help lists the commands")
        try:
            while (line := _read_line(interactive)) is not None:
                try:
                    if self._handle(line.strip()):
                        return
                except AnydraftError as error:  # this line failed, the conversation goes on
                    render.note(f"anydraft: {error}")
        finally:
            self.conversation.close()

    def _handle(self, line: str) -> bool:
        """Do what a line says; True to leave."""
        if not line.startswith("/"):
            if line:
                self._answer(line)
            return False
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command in ("/exit", "/quit"):
            return True
        if command == "/help":
            render.note(HELP)
        elif command == "/reset":
            self.turns, self.first, self.stats = [], 0, []
            self._forget()
            self._note("the conversation begins anew")
        elif command == "/system":
            if rest:
                self.system = rest
            render.note(f"system: {self.system}" if self.system else "there is no system message")
        elif command == "/stats":
            self._show_stats()
        elif command == "/save":
            self._save(rest)
        else:
            render.note(f"unknown command {command}; /help lists them")
        return False

    def _answer(self, line: str) -> None:
        self._drop_what_does_not_fit(line)
        messages = self._messages(line)
        vocabulary = self.engine.vocabulary
        printer = render.AnswerPrinter(sys.stdout, vocabulary, show_draft=self.show_draft)
        text = ""
        try:
            with common.interruptible() as cancelled:
                for chunk in self.engine.stream(
                    conversation=self.conversation,
                    cancelled=cancelled,
                    messages=messages,
                    **self.fields,
                ):
                    text += chunk.text
                    printer.push(chunk)
                    if chunk.stats is not None:
                        self._count(chunk.stats, chunk.finish_reason)
        except (KeyboardInterrupt, AnydraftError) as error:
            printer.abandon()
            self._forget()  # the states may have been left between two lengths
            if isinstance(error, AnydraftError):
                raise
        if text:
            self.turns.append(Turn(line, text))

    def _messages(self, line: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        past = [message for turn in self.turns[self.first :] for message in turn.messages()]
        return [*system, *past, {"role": "user", "content": line}]

    def _drop_what_does_not_fit(self, line: str) -> None:
        """Let the oldest turns go until the question and an answer fit into the context.

        Raises:
            PromptTooLongError: the question alone does not fit.
        """
        from anydraft.engine import GenerationRequest

        limit = self.engine.target.max_length
        before = self.first
        while True:
            try:
                ids = self.engine.encode(GenerationRequest(messages=self._messages(line)))
                if limit is None or len(ids) + min(self.fields["max_tokens"], limit // 4) <= limit:
                    break
            except PromptTooLongError:
                if self.first == len(self.turns):
                    raise
            if self.first == len(self.turns):
                break
            self.first += 1
        for turn in self.turns[before : self.first]:
            render.note(
                f"note: the conversation has outgrown the context of {limit} tokens; the model no "
                f"longer sees the turn that began: {_shorten(turn.user)}"
            )

    def _count(self, stats: Stats, finish_reason: str | None) -> None:
        self.stats.append(stats)
        words = [f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s"]
        if stats.draft_n:
            words.append(f"{stats.tokens_per_round:.2f} tokens per round")
        if finish_reason != "stop":
            ended = {"length": "cut off by the length limit"}
            words.append(ended.get(finish_reason or "", finish_reason or ""))
        self._note(f"({'; '.join(words)})")
        if stats.draft_error is not None:
            self._note(f"the draft failed and the target went on alone: {stats.draft_error}")

    def _show_stats(self) -> None:
        if not self.stats:
            render.note("nothing has been said yet")
            return
        for line in render.stats_lines(self.stats, draft=self.draft):
            render.note(line)
        if self.fields["temperature"]:
            render.note(f"seed: {self.fields['seed']}")

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file")
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += [message for turn in self.turns for message in turn.messages()]
        text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            Path(name).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {name}: {error.strerror}") from None
        render.note(f"{len(messages)} messages saved to {name}")

    def _forget(self) -> None:
        from anydraft.engine import Conversation

        self.conversation.close()
        self.conversation = Conversation()

    def _note(self, message: str) -> None:
        if not self.quiet:
            render.note(message)


def _read_line(interactive: bool) -> str | None:
    """The next line, or None at the end."""
    while True:
        try:
            if interactive:
                return input("> ")
            return sys.stdin.readline() or None
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            render.note("\n/exit or Ctrl-D leaves")


def _shorten(text: str, length: int = 50) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
