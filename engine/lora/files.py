"""Reads the two files of an adapter's directory, which are untrusted.

Everything is checked before use: file sizes, the header's size, and the offsets of each tensor. The
content is kept as bytes, so that an adapter's version is a digest of exactly the bytes that are
served.
"""

import os
import stat
from hashlib import blake2b
from math import prod
from pathlib import Path

import msgspec

from engine.lora.adapter_config import (
    MAX_CONFIG_SIZE,
    AdapterConfig,
    BadAdapter,
    parse_adapter_config,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

MAX_HEADER_SIZE = 4 << 20
"""Maximum bytes of a header: adapting everything in a hundred layers takes less than 1 MB."""

_MAX_TENSORS = 20_000
_ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


class StoredTensor(msgspec.Struct, frozen=True):
    """Location of a tensor in the file's data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class AdapterFiles(msgspec.Struct, frozen=True):
    """The content of an adapter's directory."""

    config: AdapterConfig
    tensors: dict[str, StoredTensor]
    data: memoryview
    """The data that `data_offsets` refer to."""
    directory: Path
    version: str
    """Digest of both files: equal for equal adapters, wherever they are stored."""


def resolve_adapter(path: str, root: str | None) -> Path:
    """Return the adapter's directory, with all links resolved.

    Args:
        path: absolute, or relative to the root if there is one.
        root: the directory that must contain all adapters; None: no restriction.

    Raises:
        BadAdapter: it is not a directory, or is outside of the root.
    """
    try:
        if "\0" in path:
            raise BadAdapter("the path contains a null byte")
        base = Path(root).expanduser().resolve() if root is not None else Path.cwd()
        directory = (base / Path(path).expanduser()).resolve()
        if root is not None and not directory.is_relative_to(base):
            raise BadAdapter(f"{path} is outside of --lora-dir")
        if not directory.is_dir():
            raise BadAdapter(f"{path} is not a directory")
    except (OSError, RuntimeError) as error:
        raise BadAdapter(f"{path} cannot be opened: {_reason(error)}") from error
    return directory


def read_adapter(directory: Path, root: str | None, max_size: int) -> AdapterFiles:
    """Read a directory returned by `resolve_adapter`.

    Args:
        directory: contains the two files.
        root: must contain the files too, since they can be links.
        max_size: maximum bytes of an adapter's weights for the served model.

    Raises:
        BadAdapter: a file is missing, invalid or too large.
    """
    config = _read(directory, CONFIG_FILE, root, MAX_CONFIG_SIZE)
    parsed = parse_adapter_config(config)
    weights = _read(directory, WEIGHTS_FILE, root, max_size + MAX_HEADER_SIZE)
    tensors, data = _parse_safetensors(weights)
    digest = blake2b(digest_size=16, person=b"swell adapters")
    for part in (len(config).to_bytes(8), config, weights):
        digest.update(part)
    return AdapterFiles(parsed, tensors, data, directory, digest.hexdigest())


def _read(directory: Path, name: str, root: str | None, limit: int) -> bytes:
    try:
        path = (directory / name).resolve()
        if root is not None and not path.is_relative_to(Path(root).expanduser().resolve()):
            raise BadAdapter(f"{name} is a link to outside of --lora-dir")
        if not path.exists():
            raise BadAdapter(_missing(directory, name))
        # Links are resolved, but the path can have been replaced, by a link or a pipe: neither may
        # block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadAdapter(f"{name} is not a regular file")
            if status.st_size > limit:
                raise BadAdapter(
                    f"{name} has {status.st_size:,} bytes; an adapter for this model has at most "
                    f"{limit:,}"
                )
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(limit)
        finally:
            os.close(descriptor)  # a directory has no file object to close it
    except (OSError, RuntimeError) as error:
        raise BadAdapter(f"{name} cannot be read: {_reason(error)}") from error


def _missing(directory: Path, name: str) -> str:
    if name == WEIGHTS_FILE and (directory / "adapter_model.bin").exists():
        return (
            f"there is no {name}: adapter_model.bin is a pickle, which is never loaded; save the "
            "adapter with safe_serialization=True"
        )
    return f"there is no {name} in {directory.name}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _parse_safetensors(content: bytes) -> tuple[dict[str, StoredTensor], memoryview]:
    """Return the locations of tensors, and their data.

    Raises:
        BadAdapter: the header is invalid or does not match the file.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise BadAdapter(f"{WEIGHTS_FILE} ends before its header does")
    if size > MAX_HEADER_SIZE:
        raise BadAdapter(f"{WEIGHTS_FILE} has a header of {size:,} bytes")
    try:
        header = msgspec.json.decode(content[8 : 8 + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if len(header) > _MAX_TENSORS:
            raise BadAdapter(f"{WEIGHTS_FILE} has {len(header):,} tensors")
        tensors = {
            name: msgspec.json.decode(value, type=StoredTensor) for name, value in header.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAdapter(f"the header of {WEIGHTS_FILE} is invalid: {error}") from error
    data = memoryview(content)[8 + size :]
    for name, tensor in tensors.items():
        (first, end), kind = tensor.data_offsets, tensor.dtype
        item = _ITEM_SIZES.get(kind)
        if item is None:
            raise BadAdapter(f"{name} has dtype {kind[:20]}; supported: {list(_ITEM_SIZES)}")
        if not 0 <= first <= end <= len(data) or min(tensor.shape, default=0) < 0:
            raise BadAdapter(f"{name} lies outside of {WEIGHTS_FILE}")
        if len(tensor.shape) > 4 or prod(tensor.shape) * item != end - first:
            raise BadAdapter(f"{name} does not have the size that its shape requires")
    return tensors, data
