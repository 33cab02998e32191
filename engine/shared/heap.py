"""Keeps Python's garbage collector from pausing a process that serves."""

import gc


def settle_heap() -> None:
    """Exempt all objects that exist now from collections; to be called once a process has started.

    The libraries alone make some 200,000 objects, and to look through them takes about 0.1 s,
    during which nothing moves. They live as long as the process, so nothing would be found.
    """
    gc.collect()
    gc.freeze()
