"""Makes Triton interpret kernels if there is no device to compile them for."""

import ctypes
import os
from typing import Any


def interpret_without_device() -> None:
    """Set Triton's variable; call it before anything imports Triton."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ["TRITON_INTERPRET"] = "1"


def multiply_alike() -> None:
    """Make interpreted products independent of a row's position within a tile, bit for bit.

    numpy's float32 product is not on every CPU, a device's is. With float64, differences due to
    summation order vanish when sums are rounded; tiles are still accumulated in float32.
    """
    import numpy as np
    from triton.runtime import interpreter

    interpreted = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if 8 in (
            a.dtype.primitive_bitwidth,
            b.dtype.primitive_bitwidth,
        ):  # converted first
            return interpreted(builder, a, b, d, *precision)
        wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        sums = wide.astype(d.data.dtype) + d.data
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
