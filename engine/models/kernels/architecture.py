"""Which architecture the processors of this machine have."""

import platform


def is_x86() -> bool:
    """Whether it is x86 with 64 bits."""
    return platform.machine() in ("x86_64", "AMD64")
