"""CUDA kernels compile for common devices, without needing one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CAPABILITIES = {"Ampere": "80", "Hopper": "90", "Blackwell": "100"}


@pytest.mark.timeout(900)
def test_kernels_compile_and_fit(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    # What Triton keeps goes by the kernel's source, its own version and the options: what has
    # changed is compiled anew, the rest once on a machine.
    cache = getattr(pytestconfig, "cache", None)  # `-p no:cacheprovider` leaves none
    kept = tmp_path if cache is None else cache.mkdir("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.compiling", *CAPABILITIES.values()],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
