"""Output paths of commands, checked before the work starts."""

import os
from pathlib import Path


def writable_file(path: str | Path) -> Path:
    """Check that a file can be written, creating missing directories; return its path.

    An existing file is not modified.

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
    """Check that files can be created in a directory, creating it if missing; return its path.

    Raises:
        OSError: it cannot be used; the message names it.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path}: cannot create files in it")
    return path
