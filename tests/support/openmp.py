"""Environment for programs that choose their own OpenMP runtime."""

import os


def environment_without_openmp() -> dict[str, str]:
    """Return this process's environment without OpenMP variables set by engines in it."""
    settled = ("GOMP_", "KMP_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(settled)}
