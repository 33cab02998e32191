"""Directories of cached compiled kernels, and of those that came with the installation."""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import numba

from engine.shared.user_cache import user_cache

logger = logging.getLogger(__name__)


@cache
def cache_directory(target: str) -> str | None:
    """Return the user's cache directory for a target's kernels; None if it cannot be created.

    It is initialized from the installation's kernels. `NUMBA_CACHE_DIR` overrides it.
    """
    if not numba.config.CACHE_DIR:
        try:
            path = user_cache() / "kernels" / _name(target)
            numba.config.CACHE_DIR = _own_directory(path, installed_directory(target))
        except OSError as error:
            logger.info("kernels are compiled at every start: %s", error)
    return numba.config.CACHE_DIR or None


def installed_directory(target: str) -> Path:
    """Return the directory of a target's kernels in the installation; it need not exist.

    It is trusted: whoever can write there can also write the programs.
    """
    return Path(sys.prefix) / "share" / "swell" / "kernels" / _name(target)


@cache
def _name(target: str) -> str:
    """Name a directory after all kernel sources: Numba only checks one file for changes."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return f"{digest.hexdigest()[:16]}-{target}"


def _own_directory(path: Path, begin_with: Path) -> str:
    """Create a directory whose content is executed; refuse one that others can write to."""
    if begin_with.is_dir() and not path.exists():
        _copy(begin_with, path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not os.access(path, os.W_OK):
        raise PermissionError(f"{path} must be owned and writable by this user only")
    return str(path)


def _copy(source: Path, target: Path) -> None:
    """Copy a directory atomically; other processes can do so at the same time."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as temporary:
            copied = shutil.copytree(source, Path(temporary) / target.name)
            copied.chmod(0o700)
            copied.rename(target)
    except OSError as error:
        if not target.is_dir():
            logger.info("kernels are compiled, as %s cannot be copied: %s", source, error)
