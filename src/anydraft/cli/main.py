"""`anydraft`: finds the commands, and turns errors into one line and an exit code.

Commands load when they run, so `anydraft --help` answers at once: it needs neither torch nor the
modules of the commands, only the lines below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from anydraft import __version__
from anydraft.errors import AnydraftError

COMMANDS = {
    "generate": ("generate", "Generate text from a prompt; with --draft, faster."),
    "chat": ("chat", "Talk to a model; the conversation's state is kept between turns."),
    "demo": ("demo", "Plain and drafted decoding side by side, on three cases."),
    "check": ("check", "Say whether a draft can serve a target, and how."),
    "verify": ("verify", "Check that drafting changes nothing here, and how surely."),
    "advise": ("advise", "Say whether drafting pays here, with which draft and K."),
    "bench": ("bench", "Measure pairs, draft lengths and methods over kinds of text."),
    "report": ("report", "Show a benchmark's results as a page, a table or a picture."),
    "pull": ("models", "Fetch models into the cache."),
    "list": ("models", "List the models in the cache."),
    "rm": ("models", "Remove models from the cache."),
}
"""Command -> (module under anydraft.cli whose `register(app)` adds it, its line in the help)."""


class LazyGroup(TyperGroup):
    """Commands by name; the module of one is imported only when it is about to run."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command itself, or, while the help is being written, only its line."""
        if cmd_name not in COMMANDS:
            return None
        module, line = COMMANDS[cmd_name]
        if self._listing:
            return TyperCommand(cmd_name, help=line)
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        app.callback()(_nothing)  # keeps a single command a command of a group
        import_module(f"anydraft.cli.{module}").register(app)
        group: Any = get_command(app)
        return group.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing the commands."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _nothing() -> None:
    """Nothing to do before a command."""


def _show_version(value: bool) -> None:
    if value:
        print(f"anydraft {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show tracebacks instead of one-line errors; goes anywhere."
    ),
) -> None:
    """Lossless speculative decoding: any draft speeds up any target, and the output stays its own.

    Models are names from `anydraft list`, folders, .gguf files or hub ids. Start with
    `anydraft pull smollm2-135m gemma3-270m`, then `anydraft demo`.
    """


def build() -> Any:
    """The whole tool as one command."""
    app = typer.Typer(
        cls=LazyGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool and exit: 0 done, 130 Ctrl-C, else the error's exit code (see errors.py)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]
    given = [word for word in given[:end] if word != "--debug"] + given[end:]
    try:
        build()(args=given, prog_name="anydraft")
    except AnydraftError as error:
        if debug:
            raise
        _fail(str(error) or type(error).__name__, error.exit_code)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if debug:
            raise
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        _fail(f"unexpected error, --debug shows where: {what}", 1)


def _fail(message: str, exit_code: int) -> None:
    print(f"anydraft: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
