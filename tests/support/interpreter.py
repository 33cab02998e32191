"""Has Triton interpret kernels where there is no device to compile them for."""

import ctypes
import os


def interpret_without_device() -> None:
    """Say so before anything imports Triton, which reads it then."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ["TRITON_INTERPRET"] = "1"
