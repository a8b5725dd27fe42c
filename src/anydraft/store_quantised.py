"""Quantised copies of models in the cache: a folder each, made once, anew if the source changed.

$ANYDRAFT_CACHE/quantised/NAME/     the copy and its anydraft.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anydraft import store
from anydraft.store_progress import Progress

FILE = "model.gguf"
VERSION = 1
"""Of how copies are made; those of another version are made anew."""


def quantised(
    sources: Sequence[Path],
    kind: str,
    name: str,
    make: Callable[[Path], dict[str, Any]],
    *,
    needed: int,
) -> Path:
    """The file of a quantised copy; `make` writes it unless it is there.

    It appears in one rename, and a second process waits for the first.

    Args:
        sources: the files that it is a copy of.
        kind: the type of its weights.
        name: of the model that it is a copy of.
        make: is given an empty folder, writes FILE into it, and returns what is to be recorded.
        needed: bytes on the disk while it is made.

    Raises:
        CacheError: the cache cannot be written, or the disk is too full.
    """
    folder = folder_of(sources[0], kind, name)
    identity = _identity(sources)
    if _is_complete(folder, identity):
        return folder / FILE
    with store.cache_errors(), Progress() as progress, store.lock(folder.name, progress):
        if _is_complete(folder, identity):  # another process has just made it
            return folder / FILE
        partial = store.cache_dir() / "partial" / folder.name
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            store.check_space(partial, needed, f"making a {kind} copy of {name}")
            progress.note(f"making a {kind} copy of {name}, once")
            record = {
                "name": folder.name,
                "weights": f"{kind} copy of {name}",
                **make(partial),
                "version": VERSION,
                "source": identity,
                "sizes": {FILE: (partial / FILE).stat().st_size},
            }
            (partial / store.RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
            folder.parent.mkdir(exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder / FILE


def folder_of(source: Path, kind: str, name: str) -> Path:
    """Where the copy of a source lies: one per place and type."""
    place = hashlib.sha256(str(source.absolute().parent).encode()).hexdigest()[:6]
    stem = re.sub(r"[^\w.-]+", "-", Path(name).name.removesuffix(".gguf")) or "model"
    return store.cache_dir() / "quantised" / f"{stem}-{kind}-{place}"


def _identity(sources: Sequence[Path]) -> list[list[Any]]:
    """What changes when a source does."""
    return [[s.name, (stat := s.stat()).st_size, stat.st_mtime_ns] for s in sources]


def _is_complete(folder: Path, identity: list[list[Any]]) -> bool:
    record = store.whole_record(folder)
    return record.get("version") == VERSION and record.get("source") == identity
