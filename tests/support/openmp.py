"""The environment of programs that choose their OpenMP runtime anew."""

import os


def environment_without_openmp() -> dict[str, str]:
    """Return this process's environment without what engines that ran in it have settled."""
    settled = ("GOMP_", "KMP_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(settled)}
