"""Which process of a machine compiles a kernel: one at a time, and the others load what it kept."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_SECONDS = 0.02


@contextmanager
def claimed(path: str | None, patience: float) -> Iterator[bool]:
    """Claim a file for as long as the context lasts; say whether the claim is held.

    A claim ends with its process, whatever becomes of it. Where no file can be claimed, as on file
    systems without locks, everybody is told that the claim is held.

    Args:
        path: made if it is missing; None: there is nothing to claim.
        patience: seconds to wait for another process that holds the claim.
    """
    try:
        file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        file = None
    if file is None:
        yield True
        return
    try:
        yield _lock(file, time.monotonic() + patience)
    finally:
        os.close(file)


def _lock(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return True
        else:
            return True
