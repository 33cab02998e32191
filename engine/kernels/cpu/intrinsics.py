"""Kernel functions made of LLVM instructions that Numba does not offer.

Kernels call them like Python functions. Addresses are integers.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VOID = ir.VoidType()


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that emits LLVM instructions as one that kernels can call."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(_context: Any, *_given: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else made

            return result(*arguments), generate

        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typing)

    return decorate


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emit a call of an LLVM intrinsic."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def pointer_to(builder: Any, address: Any, offset: int = 0, kind: Any = I8) -> Any:
    """Emit a pointer to values of a kind at an address plus an offset in bytes."""
    return builder.inttoptr(builder.add(address, I64(offset)), kind.as_pointer())


@instruction(types.int32, types.int64)
def call_address(builder: Any, address: Any) -> Any:
    """Call `int f(void)` at an address, or `void f(void)` with a meaningless result."""
    return builder.call(builder.inttoptr(address, ir.FunctionType(I32, []).as_pointer()), [])


def integers_at(first: int, count: int) -> Any:
    """Return a function that reads `count` 64-bit integers from index `first` of a pointer.

    It returns a tuple.
    """

    @instruction(types.UniTuple(types.int64, count), types.CPointer(types.int64))
    def integers(builder: Any, pointer: Any) -> Any:
        values = ir.Constant(ir.ArrayType(I64, count), ir.Undefined)
        for i in range(count):
            value = builder.load(builder.gep(pointer, [I64(first + i)]))
            values = builder.insert_value(values, value, i)
        return values

    return integers
