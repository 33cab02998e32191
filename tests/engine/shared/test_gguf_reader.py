"""Malformed model files: counts are checked against the file size before allocation."""

import struct
from pathlib import Path

import pytest

from engine.shared.gguf.reader import BadGguf, read_gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(
    tmp_path: Path,
    *,
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    head: bytes | None = None,
    data: bytes = bytes(64),
) -> Path:
    entries, tensors = entries or [], tensors or []
    head = head or b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    before = head + b"".join(entries) + b"".join(tensors)
    path = tmp_path / "file.gguf"
    path.write_bytes(before + bytes(-len(before) % 32) + data)
    return path


def test_metadata_and_tensor_offsets_are_read(tmp_path: Path) -> None:
    numbers = struct.pack("<IQ3I", U32, 3, 7, 8, 9)
    strings = struct.pack("<IQ", STRING, 2) + text(b"a") + text("ß".encode())
    path = file(
        tmp_path,
        entries=[
            entry(b"name", STRING, text(b"x")),
            entry(b"numbers", ARRAY, numbers),
            entry(b"strings", ARRAY, strings),
            entry(b"half", F32, struct.pack("<f", 0.5)),
        ],
        tensors=[tensor(b"one", [4, 2], 0, 0), tensor(b"two", [32], 8, 28)],
    )
    found = read_gguf(path)
    assert found.metadata == {
        "name": "x",
        "numbers": [7, 8, 9],
        "strings": ["a", "ß"],
        "half": 0.5,
    }
    one, two = found.tensors["one"], found.tensors["two"]
    assert (one.shape, one.storage.name, one.num_bytes) == ((2, 4), "F32", 32)
    assert (two.storage.name, two.num_bytes, two.offset - one.offset) == ("Q8_0", 34, 28)
    assert one.offset % 32 == 0


HUGE = 1 << 62
MANY = entry(b"k", ARRAY, struct.pack("<IQ", BOOL, 1 << 20) + bytes(1 << 20))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"head": b"PK\x03\x04" + bytes(20)}, "not a GGUF file"),
        ({"head": b"GGUF" + struct.pack("<IQQ", 1, 0, 0)}, "version 1"),
        ({"head": b"GGUF" + struct.pack(">IQQ", 3, 0, 0)}, "little-endian"),
        ({"head": b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0)}, "tensors"),
        ({"head": b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE)}, "metadata keys"),
        ({"head": b"GGUF" + struct.pack("<IQQ", 3, 0, 9)}, "file ends|unknown type|too long"),
        ({"entries": [struct.pack("<Q", HUGE)]}, "bytes of a string"),
        ({"entries": [entry(b"k", STRING, struct.pack("<Q", HUGE))]}, "bytes of a string"),
        ({"entries": [entry(b"k", ARRAY, struct.pack("<IQ", U64, HUGE))]}, "entries of arrays"),
        ({"entries": [entry(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))]}, "arrays of type 9"),
        ({"entries": [entry(b"k", 77, b"")]}, "unknown type 77"),
        ({"entries": [MANY, MANY, MANY]}, "entries of arrays"),
        ({"entries": [entry(b"general.alignment", U32, bytes(4))]}, "alignment 0"),
        ({"tensors": [tensor(b"t", [1] * 5, 0, 0)]}, "5 dimensions"),
        ({"tensors": [tensor(b"t", [33], 8, 0)]}, "impossible shape"),
        ({"tensors": [tensor(b"t", [0], 0, 0)]}, "impossible shape"),
        ({"tensors": [tensor(b"t", [HUGE, HUGE], 0, 0)]}, "impossible shape"),
        ({"tensors": [tensor(b"t", [32], 99, 0)]}, "type 99; served are F32"),
        ({"tensors": [tensor(b"t", [32], 0, 0)]}, "beyond the end"),
        ({"tensors": [tensor(b"t", [1], 0, (1 << 64) - 1)]}, "beyond the end"),
        ({"tensors": [tensor(b"t", [1], 0, 0)] * 2}, "two tensors"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, parts: dict, reason: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadGguf, match=reason):
        read_gguf(file(tmp_path, **parts))


def test_truncated_file_is_refused_at_any_length(tmp_path: Path) -> None:
    whole = file(
        tmp_path,
        entries=[entry(b"name", STRING, text(b"x"))],
        tensors=[tensor(b"one", [16], 0, 0)],
    ).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole) - 1):  # from an empty file on
        cut.write_bytes(whole[:length])
        with pytest.raises(BadGguf):
            read_gguf(cut)
