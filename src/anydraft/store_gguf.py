"""GGUF files by name: paths, folders, pulled models, and hub ids with a file pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anydraft.errors import ModelFileError, ModelNotFoundError

_HUB = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<pattern>[^/:]+))?"
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")


def names_gguf(spec: str | Path) -> bool:
    """Whether a model's name means a GGUF file rather than a folder of safetensors.

    So do a .gguf path, a folder that holds .gguf and no config.json, a hub id with a file pattern
    ("organisation/name:Q4_K_M"), and one whose name ends in "-GGUF". A pulled model has both; it
    is no GGUF file unless the runtime says so.
    """
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        return True
    if path.is_dir():
        return not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    match = None if isinstance(spec, Path) else _hub(str(spec))
    return bool(match and (match["pattern"] or match["repository"].lower().endswith("-gguf")))


def resolve_gguf(spec: str | Path, revision: str | None = None) -> Path:
    """The GGUF file that `spec` means; of a split one, the first part.

    Raises:
        ModelNotFoundError: nothing of that name, or several files that the pattern fits.
        ModelFileError: the path exists but is no GGUF file.
        CacheError: a hub id that is not in the cache while the hub cannot be reached.
    """
    from anydraft import store
    from anydraft.store_catalogue import CATALOGUE

    text, path = str(spec), Path(spec).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if not path.exists() and not isinstance(spec, Path) and text not in CATALOGUE:
        match = _hub(text)
        if match is not None:
            return hub_gguf(match["repository"], revision or match["revision"], match["pattern"])
    found = store.resolve(spec)
    return found if found.is_file() else _in_folder(found)


def _hub(text: str) -> re.Match[str] | None:
    match = _HUB.fullmatch(text)
    if match and not text.startswith((".", "~", "/")) and not match["repository"].endswith(".gguf"):
        return match
    return None


def _in_folder(folder: Path) -> Path:
    from anydraft import store

    recorded = store.describe(folder).get("gguf", {}).get("file")
    if recorded:
        return folder / str(recorded)
    names = [path.name for path in folder.glob("*.gguf")]
    if not names:
        raise ModelFileError(f"the folder {folder} holds no .gguf file, which llama.cpp runs")
    return folder / _only(names, str(folder), None)


def _only(names: Iterable[str], where: str, pattern: str | None) -> str:
    """The one model among file names, its first part if it is split.

    Raises:
        ModelNotFoundError: none fits, or several do.
    """
    names = sorted(names)
    fitting = [name for name in names if _fits(name, pattern)]
    models = {_PART.sub("", name): name for name in reversed(fitting)}
    if len(models) == 1:
        return next(iter(models.values()))
    others = {_PART.sub("", name) for name in names if _fits(name, None)}
    shown = ", ".join(sorted(models or others)[:12]) or "none"
    if not models:
        what = f"no GGUF file fits {pattern!r}" if pattern else "there is no GGUF file"
        raise ModelNotFoundError(f"{where}: {what}; there are: {shown}")
    raise ModelNotFoundError(
        f"{where} holds several GGUF files; choose one, e.g. {where}:{next(iter(models))} "
        f"(there are: {shown})"
    )


def _fits(name: str, pattern: str | None) -> bool:
    """By wild cards, or as a part of the name in any case ("q4_k_m")."""
    base = name.rsplit("/", 1)[-1]
    if not base.endswith(".gguf"):
        return False
    if pattern is None or "mmproj" not in pattern.lower():
        if base.lower().startswith("mmproj"):  # a projector is no model
            return False
        if pattern is None:
            return True
    if any(c in pattern for c in "*?["):
        return fnmatch(base, pattern)
    return pattern.lower() in base.lower()


def hub_gguf(
    repository: str, revision: str | None, pattern: str | None, progress: bool = True
) -> Path:
    """A file of a hub model: from our cache, else from huggingface_hub's own, else from the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from anydraft import store
    from anydraft.store_fetch import hub_errors

    ours = store.cache_dir() / "hub"
    where = repository + (f"@{revision}" if revision else "")
    for cache in (ours, Path(HF_HUB_CACHE)):
        if (folder := _on_disk(repository, revision, cache)) is not None:
            names = [str(p.relative_to(folder)) for p in folder.rglob("*.gguf")]
            if any(_fits(name, pattern) for name in names):
                return folder / _only(names, where, pattern)
    with store.cache_errors(), hub_errors(repository, revision):
        import huggingface_hub

        info = huggingface_hub.HfApi().model_info(repository, revision=revision or "main")
        names = [sibling.rfilename for sibling in info.siblings or ()]
    chosen = _only([n for n in names if n.endswith(".gguf")], where, pattern)
    stem = _PART.sub("", chosen)
    wanted = [name for name in names if _PART.sub("", name) == stem]
    with store.cache_errors(), hub_errors(repository, revision):
        ours.mkdir(parents=True, exist_ok=True)
        return _fetch(repository, revision, ours, wanted, progress) / chosen


def _on_disk(repository: str, revision: str | None, cache: Path) -> Path | None:
    """What a hub cache holds of a snapshot, whole or in part (the client asks for whole ones)."""
    root = cache / f"models--{repository.replace('/', '--')}"
    commit = revision or "main"
    if (reference := root / "refs" / commit).is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    folder = root / "snapshots" / commit
    return folder if folder.is_dir() else None


def _fetch(
    repository: str, revision: str | None, cache: Path, wanted: list[str], progress: bool
) -> Path:
    """Fetch some files of a snapshot; its folder."""
    import huggingface_hub

    from anydraft.store_fetch import silent_bars

    options: dict[str, Any] = {} if progress else {"tqdm_class": silent_bars()}
    return Path(
        huggingface_hub.snapshot_download(
            repository, revision=revision, cache_dir=cache, allow_patterns=wanted, **options
        )
    )
