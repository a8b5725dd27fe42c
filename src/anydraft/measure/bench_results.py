"""The file of a benchmark's results: written so that nothing is lost, read with suspicion.

docs/results.md describes the format. A file is replaced as a whole after every block of runs, so an
interruption, even of the machine, leaves the last complete state.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anydraft.errors import CacheError, RequestError

SCHEMA = "anydraft.bench"
VERSION = 1

_SHAPE: dict[str, type] = {
    "machine": dict,
    "plan": dict,
    "pairs": list,
    "prompts": list,
    "runs": list,
    "cells": list,
}
_RUN_KEYS = (
    "pair",
    "contender",
    "method",
    "num_draft_tokens",
    "sampling",
    "prompt",
    "turn",
    "repeat",
)


def new(plan: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Results without runs."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "created": _now(),
        "updated": _now(),
        "complete": False,
        "machine": dict(machine),
        "plan": dict(plan),
        "pairs": [],
        "prompts": [],
        "cells": [],
        "runs": [],
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def read(path: str | Path) -> dict[str, Any]:
    """The results in a file.

    Raises:
        RequestError: no such file, not JSON, not results, or of another version; in words.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not a result file: it is not text") from None
    try:
        results = json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"{path} is damaged: it is not complete JSON ({error}). It was left as it is"
        ) from None
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise RequestError(f"{path} is not a result file of `anydraft bench`")
    version = results.get("version")
    if version != VERSION:
        raise RequestError(
            f"{path} has version {version!r} of the result format, and this anydraft reads version "
            f"{VERSION}: use the anydraft that wrote it, or measure again"
        )
    for key, kind in _SHAPE.items():
        if not isinstance(results.get(key), kind):
            raise RequestError(f"{path} is damaged: {key!r} is missing or not a {kind.__name__}")
    for run in results["runs"]:
        if not isinstance(run, dict) or any(key not in run for key in _RUN_KEYS):
            raise RequestError(f"{path} is damaged: one of its runs lacks {', '.join(_RUN_KEYS)}")
    loaded: dict[str, Any] = results
    return loaded


def write(path: str | Path, results: dict[str, Any]) -> None:
    """Replace the file by these results, completely or not at all.

    Raises:
        CacheError: the disk is full or the folder cannot be written.
    """
    file = Path(path).expanduser()
    partial = file.with_name(file.name + ".partial")
    results["updated"] = _now()
    try:
        with open(partial, "w", encoding="utf-8") as out:
            out.write(_as_text(results))
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CacheError(f"cannot write the results to {file}: {error.strerror}") from None


def _as_text(results: Mapping[str, Any]) -> str:
    """JSON with a line for each run, and runs last: readable, and not long."""
    rest = {key: value for key, value in results.items() if key != "runs"}
    head = json.dumps(rest, ensure_ascii=False, allow_nan=False, indent=1).removesuffix("\n}")
    runs = ",\n".join(
        json.dumps(run, ensure_ascii=False, allow_nan=False) for run in results["runs"]
    )
    return f'{head},\n "runs": [\n{runs}\n]\n}}\n'


def check_writable(path: str | Path) -> None:
    """See before a long measurement that its results can be written.

    Raises:
        RequestError: the file exists, or its folder cannot be written.
    """
    file = Path(path).expanduser()
    if file.exists():
        raise RequestError(
            f"{path} exists and is not overwritten: go on with it by --resume {path}, or name "
            "another file with --output"
        )
    if not os.access(file.absolute().parent, os.W_OK):
        raise RequestError(f"cannot write {path}: its folder is missing or not writable")


# --- tables ---------------------------------------------------------------------------------------

_LISTS = {"drafted_at", "accepted_at"}


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row per run, with the columns that spreadsheets can use; see docs/results.md."""
    found = []
    for run in results["runs"]:
        row = {k: v for k, v in run.items() if k not in _LISTS and not isinstance(v, dict)}
        row["num_draft_tokens"] = str(row["num_draft_tokens"])  # "auto" among them
        for name in sorted(_LISTS):
            row[name] = " ".join(str(n) for n in run.get(name, ()))
        found.append(row)
    return found


def write_csv(path: str | Path, results: Mapping[str, Any]) -> None:
    """One line per run.

    Raises:
        CacheError: the file cannot be written.
    """
    table = rows(results)
    try:
        with open(Path(path).expanduser(), "w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, _columns(table), restval="")
            writer.writeheader()
            writer.writerows({k: _inert(v) for k, v in row.items()} for row in table)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None


def _inert(value: Any) -> Any:
    """Text that a spreadsheet does not take for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def write_parquet(path: str | Path, results: Mapping[str, Any]) -> None:
    """One row per run; opens in Power BI, pandas, DuckDB and others.

    Raises:
        RequestError: pyarrow is not installed.
        CacheError: the file cannot be written.
    """
    parquet = need_pyarrow("to write Parquet")
    import pyarrow

    table = rows(results)
    columns = {name: [row.get(name) for row in table] for name in _columns(table)}
    try:
        parquet.write_table(pyarrow.table(columns), str(Path(path).expanduser()))
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror or error}") from None


def need_pyarrow(purpose: str) -> Any:
    """pyarrow's module for Parquet.

    Raises:
        RequestError: it is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise RequestError(
            f"{purpose}, pyarrow is needed: pip install 'anydraft[report]'"
        ) from None
    return parquet


def _columns(table: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in table for name in row))
