"""The header of a GGUF file: metadata and where the tensors lie, read without loading anything.

A library that maps a damaged file may abort the whole process, so what can be known is looked at
here first, and said in words.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anydraft.errors import ModelFileError

# GGUF value types: number -> struct format; 8 is a string, 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        kind: number of its GGML type.
        offset: bytes from the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        meta: scalars and strings, short arrays, and those arrays that were asked for. Other long
            arrays are None.
        data_start: offset of the tensors' data in the file.
    """

    path: Path
    meta: dict[str, Any]
    tensors: list[GgufTensor]
    data_start: int
    parts: list[Path] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        return str(self.meta.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own group: get("block_count")."""
        value = self.meta.get(f"{self.architecture}.{key}")
        return default if value is None else value


class _Reader:
    def __init__(self, data: Any) -> None:
        self.data = data
        self.at = 0

    def scalar(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return value

    def string(self) -> bytes:
        length = self.scalar("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise EOFError
        return bytes(self.data[start : self.at])

    def strings(self, count: int, wanted: bool) -> list[bytes] | None:
        """An array of strings; walked over where it is not wanted."""
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        found: list[bytes] = []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            if end > len(data):
                raise EOFError
            if wanted:
                found.append(data[at + 8 : end])
            at = end
        self.at = at
        return found if wanted else None

    def array(self, wanted: bool) -> Any:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count, wanted)
        if kind not in _SCALARS:
            raise ValueError(f"an array of unknown type {kind}")
        size = count * struct.calcsize(_SCALARS[kind])
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise EOFError
        if not wanted and count > 1024:
            return None
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start))

    def value(self, wanted: bool) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.array(wanted)
        if kind not in _SCALARS:
            raise ValueError(f"a value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])


def read_header(path: Path, arrays: Iterable[str] = ()) -> GgufHeader:
    """Read one file's header.

    Args:
        arrays: keys of long arrays that are wanted too; strings come as bytes.

    Raises:
        ModelFileError: no GGUF file, a version that is not known, or one that ends too soon.
    """
    wanted = set(arrays)
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise EOFError
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, _Reader(data), wanted)
    except (EOFError, struct.error, IndexError) as error:
        raise ModelFileError(f"{path} is truncated: it ends inside its header") from error
    except ValueError as error:
        raise ModelFileError(f"{path} is not a readable GGUF file: {error}") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _read(path: Path, reader: _Reader, wanted: set[str]) -> GgufHeader:
    if reader.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    reader.at = 4
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} (2 and 3 are known)")
    num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
    meta: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string().decode("utf-8", "replace")
        meta[key] = reader.value(key in wanted)
    tensors = []
    for _ in range(num_tensors):
        name = reader.string().decode("utf-8", "replace")
        dimensions = reader.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reader.scalar("Q") for _ in range(dimensions))
        tensors.append(GgufTensor(name, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = int(meta.get("general.alignment", 32)) or 32
    start = -(-reader.at // alignment) * alignment
    return GgufHeader(path, meta, tensors, start)


def read_model_header(path: Path, arrays: Iterable[str] = ()) -> GgufHeader:
    """The header of a model, all parts of a split one checked: nothing missing, nothing cut off.

    Raises:
        ModelFileError: says which file is not whole.
    """
    header = read_header(path, arrays)
    check_data(header)
    count = int(header.meta.get("split.count", 0) or 0)
    header.parts = [path]
    if count > 1:
        header.parts = _parts(path, int(header.meta.get("split.no", 0)), count)
        for part in header.parts[1:]:
            other = read_header(part)
            check_data(other)
            header.tensors += other.tensors
    return header


def _parts(path: Path, number: int, count: int) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, and its name does not say which: it must "
            f"end in -{number + 1:05}-of-{count:05}.gguf"
        )
    names = [f"{match['prefix']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    parts = [path.parent / name for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, and {len(missing)} are missing beside it: "
            + ", ".join(missing[:3])
            + (", …" if len(missing) > 3 else "")
        )
    if number != 0:
        raise ModelFileError(f"{path} is part {number + 1} of {count}: name the first, {parts[0]}")
    return parts


def check_data(header: GgufHeader) -> None:
    """Whether the file is long enough for its tensors.

    Raises:
        ModelFileError: it is truncated.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = header.data_start
    for tensor in header.tensors:
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        except (ValueError, KeyError):  # newer than our table: the library judges
            continue
        elements = 1
        for dimension in tensor.shape:
            elements *= dimension
        end = max(end, header.data_start + tensor.offset + elements // block * size)
    have = header.path.stat().st_size
    if have < end:
        raise ModelFileError(
            f"{header.path} is truncated: it holds {have:,} bytes of at least {end:,}; "
            "fetch it again"
        )
