"""Has Triton interpret kernels where there is no device to compile them for."""

import ctypes
import os
from typing import Any


def interpret_without_device() -> None:
    """Say so before anything imports Triton, which reads it then."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ["TRITON_INTERPRET"] = "1"


def multiply_alike() -> None:
    """Have interpreted products give a row of a tile the same bits wherever in the tile it lies.

    numpy's product in 32 bits does not on every processor, a device does. In 64 bits what the order
    of additions changes is lost when the sums are rounded; tiles are added up in 32 bits as before.
    """
    import numpy as np
    from triton.runtime import interpreter

    interpreted = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):  # which it converts first
            return interpreted(builder, a, b, d, *precision)
        wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        sums = wide.astype(d.data.dtype) + d.data
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
