"""What the benchmark makes a model write: eight kinds of prompts, or the user's own.

The prompts in this folder were written for anydraft, as JSON lines of `id`, `kind` and `text`. A
prompt file of the user's is read in whichever of these forms it has:

    .txt and others     one prompt, the whole file
    .jsonl              per line an object: `text` or `prompt`, optionally `id` and `kind`; or the
                        form of Spec-Bench's question.jsonl and of SPEED-Bench: `question_id`,
                        `category`, `turns`
    .parquet            SPEED-Bench's tables (needs the extra `report`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydraft.errors import RequestError

KINDS = (
    "writing",
    "question_answering",
    "code",
    "code_edit",
    "mathematics",
    "summarising",
    "translation",
    "retrieval",
)
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a workload.

    Attributes:
        id: unique within a benchmark.
        kind: what results are grouped by.
        turns: what the user says, one after another; nearly always one.
    """

    id: str
    kind: str
    turns: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A hash of the text, by which a resumed benchmark knows that it is still the same."""
        return hashlib.sha256("\0".join(self.turns).encode()).hexdigest()[:16]


def builtin(kinds: Iterable[str] | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts that come with anydraft.

    Args:
        kinds: of KINDS; None is all of them.
        limit: at most so many of each kind.

    Raises:
        RequestError: a kind that does not exist.
    """
    wanted = list(KINDS if kinds is None else kinds)
    for kind in wanted:
        if kind not in KINDS:
            raise RequestError(f"there is no workload {kind!r}; there are: {', '.join(KINDS)}")
    found: list[Prompt] = []
    for kind in dict.fromkeys(wanted):
        found += _read_lines(_FOLDER / f"{kind}.jsonl")[:limit]
    return found


def calibration(kinds: Iterable[str] | None = None, limit: int | None = None) -> list[Prompt]:
    """Prompts that predictions are made from: two or four of each kind, none of a workload.

    Args:
        kinds: of KINDS; None is all of them.
        limit: at most so many of each kind.
    """
    wanted = set(KINDS if kinds is None else kinds)
    return _limited(
        [p for p in _read_lines(_FOLDER / "calibration.jsonl") if p.kind in wanted], limit
    )


def from_file(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file of the user's, in any of the forms above.

    Args:
        path: the file.
        limit: at most so many of each kind.

    Raises:
        RequestError: the file cannot be read, holds no prompt, or a line is not one; with its
            number.
    """
    file = Path(path).expanduser()
    try:
        if file.suffix == ".parquet":
            prompts = [_prompt(row, f"{file}: row {n}") for n, row in enumerate(_rows(file), 1)]
        elif file.suffix in (".jsonl", ".json", ".ndjson"):
            prompts = _read_lines(file)
        else:
            text = file.read_text(encoding="utf-8")
            prompts = [Prompt(file.stem, "own", (text,))] if text.strip() else []
    except OSError as error:
        raise RequestError(f"cannot read the prompt file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt file {path} is not UTF-8 text: {error}") from None
    if not prompts:
        raise RequestError(f"the prompt file {path} is empty: it holds no prompt")
    return _limited(_distinct(prompts), limit)


def _read_lines(file: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{where} is not JSON: {error}") from None
        prompts.append(_prompt(values, where))
    return prompts


def _rows(file: Path) -> Sequence[Any]:
    from anydraft.measure.bench_results import need_pyarrow

    parquet = need_pyarrow(f"to read {file.name}")
    try:
        rows: Sequence[Any] = parquet.read_table(file).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's errors are kinds of these
        raise RequestError(f"cannot read the prompt file {file}: {error}") from None
    return rows


def _prompt(values: Any, where: str) -> Prompt:
    if not isinstance(values, dict):
        raise RequestError(f"{where} is not an object with a prompt but {type(values).__name__}")
    turns = values.get("turns")
    if turns is None:
        turns = [values.get("text", values.get("prompt"))]
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"{where}: turns must be a list with at least one text")
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(f"{where} has no prompt: give text, prompt, or turns, not empty")
    name = values.get("id", values.get("question_id"))
    kind = values.get("kind") or values.get("category") or "own"
    return Prompt(where if name is None else str(name), str(kind), tuple(turns))


def _distinct(prompts: list[Prompt]) -> list[Prompt]:
    """The same prompts with ids that are: Spec-Bench's files and joined ones may repeat some."""
    seen: dict[str, int] = {}
    result = []
    for prompt in prompts:
        count = seen[prompt.id] = seen.get(prompt.id, 0) + 1
        name = prompt.id if count == 1 else f"{prompt.id} ({count})"
        result.append(Prompt(name, prompt.kind, prompt.turns))
    return result


def _limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    if limit is None:
        return prompts
    taken: dict[str, int] = {}
    result = []
    for prompt in prompts:
        taken[prompt.kind] = taken.get(prompt.kind, 0) + 1
        if taken[prompt.kind] <= limit:
            result.append(prompt)
    return result
