"""Vectors of AVX-512 as kernels use them, and how an instruction becomes a function of Numba's.

Addresses are integers; those of weights and scratch memory are multiples of a cache line.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line."""
LANES = 16
"""Values of 32 bits in a vector."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VOID = ir.VoidType()
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(I32, LANES)
BYTES = I8.as_pointer()


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type for bfloat16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), LANES)
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
"""Pairs of bfloat16 side by side."""


def stack_memory(num_bytes: int) -> Any:
    """Return a function that returns the address of so much memory on the stack of its caller."""

    @intrinsic  # type: ignore[untyped-decorator]
    def address(_typing: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            # Numba's own function for it clears the memory, byte by byte for LLVM.
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(I8, num_bytes))
            memory.align = LINE
            return builder.ptrtoint(memory, I64)

        return types.int64(), generate

    return address


def instructions(count: int, emit: Callable[..., None]) -> tuple[Any, Any]:
    """Return what an intrinsic does with so many integers, for Numba."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit(builder, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * count), generate


def in_function(name: str, emit: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a function of the kernel's own, which has these instructions.

    LLVM takes much longer to optimize one large function than some small ones.
    """

    def emit_call(builder: Any, *arguments: Any) -> None:
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(VOID, [each.type for each in arguments])
            function = ir.Function(builder.module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block())
            emit(inside, *function.args)
            inside.ret_void()
        builder.call(function, arguments)

    return emit_call


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's intrinsics."""
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = ir.Function(module, kind, name)
    return builder.call(function, arguments)


def pointer_to(builder: Any, address: Any, offset: int = 0, kind: Any = BYTES) -> Any:
    """Return a pointer to an address plus some bytes."""
    return builder.inttoptr(builder.add(address, I64(offset)), kind)


def spread(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector of this kind with a value in all its lanes."""
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(WORDS, [0] * LANES))


def prefetch(
    builder: Any, address: Any, offset: int = 0, *, level: int = 1, is_write: bool = False
) -> None:
    """Have a line read into a cache of this level; its address may be any."""
    hints = I32(int(is_write)), I32(4 - level), I32(1)
    call(builder, "llvm.prefetch.p0", VOID, pointer_to(builder, address, offset), *hints)


@intrinsic  # type: ignore[untyped-decorator]
def add_values(_typing: Any, _sums: Any, _values: Any) -> Any:
    """Add 16 values of bfloat16 to 16 of float32; addresses are given."""

    def emit(builder: Any, sums: Any, values: Any) -> None:
        place = pointer_to(builder, sums, kind=FLOATS.as_pointer())
        bits = pointer_to(builder, values, kind=ir.VectorType(I16, LANES).as_pointer())
        wide = builder.zext(builder.load(bits, align=2), WORDS)
        shifted = builder.shl(wide, ir.Constant(WORDS, [16] * LANES))
        added = builder.fadd(builder.load(place, align=64), builder.bitcast(shifted, FLOATS))
        builder.store(added, place, align=64)

    return instructions(2, emit)


@intrinsic  # type: ignore[untyped-decorator]
def round_values(_typing: Any, _sums: Any, _target: Any) -> Any:
    """Store 16 values of float32 as bfloat16; addresses are given."""

    def emit(builder: Any, sums: Any, target: Any) -> None:
        values = builder.load(pointer_to(builder, sums, kind=FLOATS.as_pointer()), align=64)
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", BFLOATS, values)
        builder.store(rounded, pointer_to(builder, target, kind=BFLOATS.as_pointer()), align=2)

    return instructions(2, emit)
