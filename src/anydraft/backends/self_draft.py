"""The quantised self-draft: a copy of the target with smaller weights, run by llama.cpp.

`draft="self:q4_0"` needs no second model: the copy agrees with its target most of the time, has its
vocabulary, and takes a fraction of the time per token where the target's weights are wide. It is
made once, by llama.cpp's own quantiser, and kept in the cache.
"""

from __future__ import annotations

import ctypes
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydraft.backends import SELF, infer_runtime, note_origin
from anydraft.errors import (
    CacheError,
    ModelFileError,
    RequestError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from anydraft.backends.llama_cpp import LlamaModel
    from anydraft.model import LanguageModel

log = logging.getLogger(__name__)

KINDS = {
    "q2_k": 2.6, "q3_k_s": 3.4, "q3_k_m": 3.9, "q3_k_l": 4.3, "iq4_xs": 4.3, "q4_0": 4.5,
    "iq4_nl": 4.5, "q4_k_s": 4.6, "q4_k_m": 4.9, "q4_1": 5.0, "q5_0": 5.5, "q5_k_s": 5.5,
    "q5_k_m": 5.7, "q5_1": 6.0, "q6_k": 6.6, "q8_0": 8.5,
}  # fmt: skip
"""What a copy may be quantised to, by llama.cpp's names, and about how many bits a weight takes."""
_WORTH_IT = 0.75  # of the target's bits: more leaves a draft nothing to gain
_WIDE = ("F32", "F16", "BF16")


def kind_of(spec: str) -> str:
    """The type in a name like "self:q4_0".

    Raises:
        RequestError: no type, or one that is not known; says which are.
    """
    kind = spec.removeprefix(SELF).lower()
    if kind not in KINDS:
        what = "no type is given in" if spec in ("self", SELF) else f"unknown type {kind!r} in"
        raise RequestError(f"{what} draft {spec!r}; known: {', '.join(KINDS)}, e.g. {SELF}q4_0")
    return kind


def load_self_draft(
    target: LanguageModel,
    spec: str,
    *,
    runtime: str | None = None,
    source: Path | None = None,
    **options: Any,
) -> LlamaModel:
    """Open a quantised copy of `target`, made first if it is not in the cache.

    Args:
        target: a model that was loaded from files.
        spec: "self:" and one of KINDS.
        runtime: None or "llama_cpp".
        source: what to copy in place of the target: a model with the same vocabulary.
        options: of llama_cpp, for the copy.

    Raises:
        RequestError: the type is unknown, or the target is not wider than the copy would be.
        ModelError: llama-cpp-python is not installed, or the target's files cannot be copied.
        CacheError: the copy cannot be written.
    """
    from anydraft.backends import llama_cpp
    from anydraft.backends.llama_library import library

    kind = kind_of(spec)
    infer_runtime(spec, runtime)  # refuses any other than llama_cpp
    library()
    name = Path(target.name if source is None else source).name
    path = quantised_copy(source or source_of(target), kind, name)
    model = llama_cpp.load(
        path,
        role="draft",
        vocabulary=target.vocabulary,
        name=f"{name} in {kind}",
        **options,
    )
    note_origin(model, path, options)
    return model


def source_of(target: LanguageModel) -> Path:
    """The folder or GGUF file that a model was loaded from.

    Raises:
        RequestError: it was not.
    """
    header = getattr(target, "header", None)
    found = header.path if header is not None else getattr(target, "origin", {}).get("path")
    if found is None:
        raise RequestError(
            f"{target.name} was not loaded from files by anydraft, so there is nothing to make a "
            f"quantised copy of: give the target as a folder, a name or a GGUF file to use "
            f"draft='{SELF}…'"
        )
    return Path(found)


def quantised_copy(source: Path, kind: str, name: str) -> Path:
    """The GGUF file of a copy of `source` in type `kind`, made first if it is not in the cache.

    Args:
        source: a folder of safetensors, or a GGUF file.
        name: of the model, for messages and for the copy.

    Raises:
        RequestError, ModelError, CacheError: see load_self_draft.
    """
    from anydraft.store_quantised import FILE, quantised

    if source.is_dir():
        from anydraft.backends.gguf_write import weight_files

        files = [*weight_files(source, name), source / "config.json"]
        size = sum(file.stat().st_size for file in files)
        needed = 2 * size  # the copy in GGUF, and the quantised one, at most as large
    else:
        files = _wide_enough(source, kind, name)
        needed = size = sum(file.stat().st_size for file in files)

    def make(folder: Path) -> dict[str, Any]:
        wide = source
        if source.is_dir():
            from anydraft.backends.gguf_write import write_gguf

            wide = folder / "wide.gguf"
            write_gguf(source, wide, name)
        _quantise(wide, folder / FILE, kind, name)
        if wide != source:
            wide.unlink()
        shares = weight_types(folder / FILE)
        shown = ", ".join(f"{share:.0%} {type_name}" for type_name, share in shares.items())
        log.info("%s copy of %s: %s of its weights", kind, name, shown)
        return {"weights": f"{kind} copy of {name}: {shown}", "types": shares}

    return quantised(files, kind, Path(name).name, make, needed=needed)


def _wide_enough(source: Path, kind: str, name: str) -> list[Path]:
    """The parts of a GGUF file whose weights are much wider than a copy's would be.

    Raises:
        RequestError: they are not.
    """
    from anydraft.gguf_file import read_model_header

    header = read_model_header(source)
    weights = sum(math.prod(tensor.shape) for tensor in header.tensors)
    bits = 8 * sum(part.stat().st_size for part in header.parts) / max(1, weights)
    if KINDS[kind] > _WORTH_IT * bits:
        raise RequestError(
            f"{name} takes {bits:.1f} bits per weight already, and a {kind} copy of it "
            f"{KINDS[kind]:.1f}: it would hardly be faster. Draft with another, smaller model or "
            "with lookup"
        )
    if not set(weight_types(source)) & set(_WIDE):
        log.warning(
            "%s is quantised already (%.1f bits per weight): as a draft, a %s copy of it is at "
            "most %.1f times as fast", name, bits, kind, bits / KINDS[kind],
        )  # fmt: skip
    return header.parts


def weight_types(path: Path) -> dict[str, float]:
    """GGML type -> its share of a GGUF file's weights (matrices alone), the largest first."""
    from gguf import GGMLQuantizationType

    from anydraft.gguf_file import read_model_header

    counts: dict[str, int] = {}
    for tensor in read_model_header(path).tensors:
        if len(tensor.shape) > 1:
            type_name = GGMLQuantizationType(tensor.kind).name
            counts[type_name] = counts.get(type_name, 0) + math.prod(tensor.shape)
    total = max(1, sum(counts.values()))
    order = sorted(counts, key=lambda type_name: -counts[type_name])
    return {type_name: round(counts[type_name] / total, 4) for type_name in order}


def _quantise(source: Path, path: Path, kind: str, name: str) -> None:
    """llama.cpp's quantiser, its complaints as exceptions."""
    import shutil

    from anydraft.backends.llama_library import collected_errors, library
    from anydraft.backends.llama_loading import default_threads

    api = library()
    ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}", None)
    if ftype is None:
        raise UnsupportedModelError(f"this llama-cpp-python does not quantise to {kind}")
    params = api.llama_model_quantize_default_params()
    params.ftype = ftype
    params.nthread = default_threads()
    params.allow_requantize = True
    with collected_errors() as errors:
        failed = api.llama_model_quantize(
            str(source).encode(), str(path).encode(), ctypes.byref(params)
        )
    if not failed:
        return
    reason = "; ".join(errors) or "no reason given"
    if "iostream" in reason or "basic_ios" in reason:
        free = shutil.disk_usage(path.parent).free
        raise CacheError(
            f"the {kind} copy of {name} cannot be written to {path.parent} ({free / 1e9:.1f} GB "
            "are free): make room, or set ANYDRAFT_CACHE to a folder on another disk"
        )
    raise ModelFileError(f"llama.cpp cannot make a {kind} copy of {name}: {reason}")
