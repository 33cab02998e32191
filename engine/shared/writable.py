"""Places where a command writes its results, checked before the work and not after it."""

import os
from pathlib import Path


def writable_file(path: str | Path) -> Path:
    """Return a path at which a file can be written; missing directories are made.

    What is there stays as it is.

    Raises:
        OSError: it cannot be written; the message names it.
    """
    path = Path(path)
    try:
        writable_directory(path.parent)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, not a file to write to")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
    return path


def writable_directory(path: str | Path) -> Path:
    """Return a directory in which files can be made; it is made if it is missing.

    Raises:
        OSError: there cannot be one; the message names it.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path}: no files can be made there")
    return path
