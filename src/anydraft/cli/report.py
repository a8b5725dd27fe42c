"""`anydraft report`: a benchmark's results as a page, a table or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anydraft.cli.render import note
from anydraft.errors import CacheError, RequestError

FORMATS = ("html", "md", "png", "csv", "parquet")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("report")(report)


def report(
    results: Annotated[str, typer.Argument(help="A result file of `anydraft bench`.")],
    form: Annotated[
        str,
        typer.Option("--format", help="html (one file, no network), md, png, csv or parquet."),
    ] = "html",
    output: Annotated[
        str | None, typer.Option(help="Where to (default: beside the results); - is stdout.")
    ] = None,
) -> None:
    """Show a benchmark: speed-up against K, what verifying costs, acceptance, and why.

    The page is one file without references to anything outside, for screens and for paper.
    """
    if form not in FORMATS:
        raise RequestError(f"--format must be one of {', '.join(FORMATS)}, not {form!r}")
    from anydraft.measure import bench_results

    found = bench_results.read(results)
    path = Path(output or Path(results).with_suffix(f".{form}")).expanduser()
    if form in ("html", "md"):
        from anydraft.measure.report import html, markdown

        text = html(found) if form == "html" else markdown(found)
        if output == "-":
            print(text)
            return
        _write(path, text)
    elif output == "-":
        raise RequestError(f"{form} goes to a file, not to stdout")
    elif form == "png":
        from anydraft.measure.report_png import write_png

        write_png(path, found)
    elif form == "csv":
        bench_results.write_csv(path, found)
    else:
        bench_results.write_parquet(path, found)
    note(f"written: {path}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None
