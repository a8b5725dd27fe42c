"""What a pull shows on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """One stage at a time, each with a total. `enabled=False` shows nothing.

    Use as a context manager; `stage` begins a stage, `update` says how much of it is done.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bar: Any = None
        self._task: Any = None
        self._label = ""
        self._total = 1
        self._shown = 0
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, label: str, total: int) -> None:
        """Begin a stage of `total` units (bytes, tensors)."""
        self._label, self._total, self._shown = label, max(total, 1), 0
        if self._bar is not None:
            self._finish_task()
            self._task = self._bar.add_task(label, total=self._total)
        else:
            self._line(f"{label} ...")

    def update(self, done: int) -> None:
        """Say how many units of the stage are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self._total))
            return
        quarter = 4 * min(done, self._total) // self._total
        if quarter > self._shown:
            self._shown = quarter
            self._line(f"{self._label}: {25 * quarter} %")

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._line(text)

    def _finish_task(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self._bar.tasks[-1].total)

    def _line(self, text: str) -> None:
        if self._enabled:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
