"""Prompts to measure acceptance on: two kinds of our own, or the user's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydraft.errors import RequestError

_TABLE = """\
| part    | material | weight (kg) | supplier       |
|---------|----------|-------------|----------------|
| frame   | steel    | 12.5        | Aldous & Sons  |
| basket  | willow   | 1.8         | Reed Workshop  |
| bell    | brass    | 0.2         | Aldous & Sons  |
| saddle  | leather  | 1.1         | Miller Leather |
"""
_CODE = """\
def moving_average(values, width):
    result = []
    for index in range(len(values) - width + 1):
        window = values[index : index + width]
        result.append(sum(window) / width)
    return result
"""
_NOTICE = """\
The swimming hall stays closed on the first Monday of every month. Season tickets are valid for
twelve months from the day of purchase and cannot be passed on to others. Lockers must be emptied
before closing time.
"""
ORDINARY = "ordinary text"
REPEATING = "text that repeats"
YOURS = "your prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text to continue, or a chat.

    Attributes:
        kind: the group that it is counted in.
    """

    kind: str
    text: str = ""
    messages: tuple[dict[str, str], ...] | None = None

    def fields(self) -> dict[str, Any]:
        """As arguments of a request."""
        return {"prompt": self.text} if self.messages is None else {"messages": self.messages}


OWN = (
    Prompt(ORDINARY, "The old ferry crossed the river twice a day. In winter, when the ice"),
    Prompt(ORDINARY, "To bake bread at home you need flour, water, salt and yeast. First,"),
    Prompt(ORDINARY, "Question: Why do leaves change their colour in autumn?\nAnswer:"),
    Prompt(ORDINARY, "import csv\n\n\ndef read_prices(path):\n    "),
    Prompt(ORDINARY, "Dear Ms Alvarez,\n\nthank you for your letter of 3 March. We"),
    Prompt(ORDINARY, "The three most important inventions of the nineteenth century were"),
    Prompt(REPEATING, f"A table:\n\n{_TABLE}\nThe same table once more:\n\n| part    |"),
    Prompt(REPEATING, f"{_CODE}\n# The same function, with a docstring:\n\ndef moving_average("),
    Prompt(REPEATING, f"{_NOTICE}\nThe notice again, word for word:\n\nThe swimming hall"),
)
"""Written for this; none of them is in the benchmarks."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: JSON lines with "text", "prompt" or "messages", or a prompt per line.

    Raises:
        RequestError: the file cannot be read, holds no prompt, or a line is not understood.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the prompt file {path}: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_prompt(line, path, number))
    if not found:
        raise RequestError(
            f"the prompt file {path} is empty; put one prompt on each line, or JSON lines "
            'with "text" or "messages"'
        )
    return found


def _prompt(line: str, path: Path, number: int) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(YOURS, line)
    try:
        data = json.loads(line)
    except ValueError:
        return Prompt(YOURS, line)  # text that begins with a brace
    messages = data.get("messages")
    if isinstance(messages, list) and messages:
        return Prompt(YOURS, messages=tuple(messages))
    for key in ("text", "prompt"):
        if isinstance(data.get(key), str) and data[key]:
            return Prompt(YOURS, data[key])
    raise RequestError(f'line {number} of {path} has neither "text" nor "messages"')
