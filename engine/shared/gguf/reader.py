"""Reads the header of a GGUF file: metadata, and the location of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Every count is checked against the rest of the file before anything is allocated for it.
"""

import hashlib
import mmap
import re
import struct
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import msgspec

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 1 << 26
"""Maximum bytes before the weights; models with the largest vocabularies have about 15 MB."""
_MAX_ARRAY_ENTRIES = 1 << 21
"""Total over all arrays: a vocabulary of 262,144 tokens has 1.3 million with scores, types and
merges. An entry takes up to 80 bytes and 0.4 us."""
_MAX_KEY = 1 << 10
_MAX_STRING = 1 << 22
_MAX_ENTRIES = 1 << 16
"""Maximum metadata keys, and maximum tensors."""
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 40
_DEFAULT_ALIGNMENT = 32

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SIZES = {**{kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}, _BOOL: 1, _STRING: 8}
"""Minimum bytes per value, by type."""


class BadGguf(ValueError):
    """Malformed or unsupported GGUF file; the message says why."""


class Storage(msgspec.Struct, frozen=True):
    """Storage format of a tensor type: `elements` elements per block of `num_bytes` bytes."""

    name: str
    elements: int
    num_bytes: int


@cache
def storage_types() -> dict[int, Storage]:
    """Return the storage format of each supported tensor type, by its type number."""
    from gguf import GGML_QUANT_SIZES  # loads numpy, which other models' front ends do not need

    return {
        int(kind): Storage(kind.name, *sizes)
        for kind, sizes in GGML_QUANT_SIZES.items()
        if not re.match(r"I\d+$|F64|Q8_[1K]|Q1_0", kind.name)
    }


class TensorInfo(msgspec.Struct, frozen=True):
    """Location and shape of one tensor."""

    shape: tuple[int, ...]
    """Outermost dimension first, as in safetensors."""
    storage: Storage
    offset: int
    """Bytes from the start of the file."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) // self.storage.elements * self.storage.num_bytes


class Gguf(msgspec.Struct, frozen=True):
    """The header of a file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    digest: str
    """SHA-256 of everything before the weights."""


def read_gguf(path: Path) -> Gguf:
    """Read the metadata and the tensors' locations.

    Raises:
        BadGguf: the file is malformed or unsupported.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if not size:
        raise BadGguf(f"{path}: the file is empty")
    limit = min(size, _MAX_HEADER)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), limit, access=mmap.ACCESS_READ) as header,
    ):
        return _read(_Cursor(header, limit, path), size)


@dataclass(eq=False)
class _Cursor:
    """Reads values sequentially, up to a limit."""

    header: mmap.mmap
    limit: int
    path: Path

    def __post_init__(self) -> None:
        self._entries_left = _MAX_ARRAY_ENTRIES
        self.position = 0

    def bad(self, reason: str) -> BadGguf:
        return BadGguf(f"{self.path}: {reason}")

    def digest(self) -> str:
        return hashlib.sha256(self.header[: self.position]).hexdigest()

    def take(self, count: int) -> bytes:
        if count > self.limit - self.position:
            raise self.bad("the file is truncated, or its metadata is too long")
        read = self.header[self.position : self.position + count]
        self.position += count
        return read

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def count(self, limit: int, what: str) -> int:
        value = self.number("Q")
        if value > limit:
            raise self.bad(f"{value} {what} exceed the limit of {limit}")
        return value

    def text(self, limit: int = _MAX_STRING) -> str:
        return self.take(self.count(limit, "bytes of a string")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _BOOL:
            return self.take(1) != b"\0"
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        if kind == _ARRAY:
            return self._array()
        raise self.bad(f"metadata of the unknown type {kind}")

    def _array(self) -> list[Any]:
        kind = self.number("I")
        if kind not in _SIZES:
            raise self.bad(f"arrays of type {kind} are not supported")
        possible = (self.limit - self.position) // _SIZES[kind]
        count = self.count(min(possible, self._entries_left), "entries of arrays")
        self._entries_left -= count
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind == _BOOL:
            return [byte != 0 for byte in self.take(count)]
        code = _NUMBERS[kind]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))


def _read(cursor: _Cursor, size: int) -> Gguf:
    if cursor.take(4) != _MAGIC:
        raise cursor.bad("this is not a GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise cursor.bad(f"GGUF version {version} is not served, only 2 and 3, little-endian")
    num_tensors = cursor.count(_MAX_ENTRIES, "tensors")
    num_keys = cursor.count(_MAX_ENTRIES, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text(_MAX_KEY)
        metadata[key] = cursor.value(cursor.number("I"))
    placed = dict(_tensor(cursor) for _ in range(num_tensors))
    if len(placed) != num_tensors:
        raise cursor.bad("two tensors have the same name")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise cursor.bad(f"the alignment {alignment!r} is invalid")
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, info in placed.items():
        moved = msgspec.structs.replace(info, offset=start + info.offset)
        if moved.offset + moved.num_bytes > size:
            raise cursor.bad(f"the tensor {name} lies beyond the end of the file")
        tensors[name] = moved
    return Gguf(metadata, tensors, cursor.digest())


def _tensor(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name = cursor.text(_MAX_KEY)
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.bad(f"the tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
    kind, offset = cursor.number("I"), cursor.number("Q")
    storage = storage_types().get(kind)
    if storage is None:
        served = ", ".join(each.name for each in storage_types().values())
        raise cursor.bad(f"the tensor {name} is of type {kind}; served are {served}")
    if prod(shape) > _MAX_ELEMENTS or shape[-1] % storage.elements or 0 in shape:
        raise cursor.bad(f"the tensor {name} has the impossible shape {list(shape)}")
    return name, TensorInfo(shape, storage, offset)
