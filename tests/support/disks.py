"""Small file systems that can be filled."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hostile import disks
from benchmarks.hostile.disks import fill

__all__ = ["fill", "small_disk"]


@contextlib.contextmanager
def small_disk(at: Path, megabytes: int = 4) -> Iterator[Path]:
    """Mount a file system of this size; skip the test unless run as root."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    with disks.small_disk(at, megabytes) as disk:
        yield disk
