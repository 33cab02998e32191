"""How long compute threads spin before they sleep; has to be settled before torch is imported."""

import os

SPIN_COUNT = 2000
"""Iterations of libgomp's wait loop, of about 0.05 us each: some 0.1 ms."""


def limit_spinning() -> None:
    """Have idle OpenMP threads of this process and its children sleep soon.

    Between two parallel regions of a step threads wait for some microseconds, so a short spin
    spares them the way through the kernel. The library's default of 300,000 iterations is for
    machines that do nothing else: when front ends, other engines or anything at all share the
    processors, a thread that waits for one that is not running burns its whole time slice, and
    steps get many times slower. What the environment says already is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
