"""Compiles the CUDA kernels for devices that are not present; run as a program.

Runs outside the test process, in which kernels are interpreted (`tests.engine.triton_device`).
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.cuda import attention, fused, product
from engine.models.attention.tiles import TileShape, tile_shapes
from engine.models.products.invariant import SHAPES, ProductTiles

LARGEST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Maximum bytes of shared memory per program, by compute capability."""
POINTERS = {
    "sinks": "*fp32", "parts": "*fp32", "part_sums": "*fp32", "tiles": "*i32", "tables": "*i32",
    "slots": "*i64",
}  # fmt: skip
INTEGERS = ("table_width", "num_splits", "window", "max_tokens", "token_stride", "rows")
FLOATS = ("scale", "softcap", "eps")


def compile_kernel(kernel: Any, capability: int, constants: dict[str, Any], **options: int) -> None:
    """Compile a variant; raise if that fails or it exceeds the shared memory."""
    kinds = dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(FLOATS, "fp32") | POINTERS
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*bf16")
        for name in kernel.arg_names
    }
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.metadata.shared <= LARGEST_SHARED[capability], kernel


def compile_attention(capability: int, shape: TileShape, dim: int, **flags: bool) -> None:
    """Compile the kernel for a tile shape and a head size."""
    constants = {
        "GROUP": 4, "KV_HEADS": 8, "DIM": dim, "WIDTH": 1 << (dim - 1).bit_length(),
        "BLOCK_SIZE": 16, "QUERIES": shape.queries, "KEYS": shape.keys,
        **dict.fromkeys(("HAS_SINKS", "HAS_CAP", "HAS_WINDOW", "IS_SPLIT"), False), **flags,
    }  # fmt: skip
    compile_kernel(
        attention.attend_tiles,
        capability,
        constants,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def compile_all(capability: int) -> None:
    """Compile, for a device of this compute capability, the variants that use its matrix units.

    These and the memory differ by capability; `compile_rest` compiles what is alike for all.
    """
    shared = LARGEST_SHARED[capability]
    # The widest heads and the largest tiles take the most memory.
    for dim in (128, 256):
        _, prompts = tile_shapes(4, dim, shared, batch_invariant=False)
        compile_attention(capability, prompts, dim, HAS_SINKS=True, HAS_WINDOW=True)
    compile_product(capability, SHAPES[-1][1])


def compile_rest(capability: int) -> None:
    """Compile the other variants, for a device of this compute capability."""
    shared = LARGEST_SHARED[capability]
    for dim in (80, 256):  # 80 are padded
        decodes, _ = tile_shapes(4, dim, shared, batch_invariant=False)
        compile_attention(capability, decodes, dim, IS_SPLIT=True)
    invariant, _ = tile_shapes(4, 128, shared, batch_invariant=True)
    compile_attention(capability, invariant, 128, HAS_CAP=True)
    compile_kernel(
        attention.merge_splits, capability, {"HEADS": 32, "DIM": 80, "WIDTH": 128, "SPLITS": 32}
    )
    for _, tiles in SHAPES[:-1]:
        compile_product(capability, tiles)
    compile_kernel(fused.norm_rows, capability, {"COUNT": 4096, "WIDTH": 4096})
    compile_kernel(fused.norm_heads, capability, {"HEADS": 40, "DIM": 128, "WIDTH": 128})
    compile_kernel(fused.gate_rows, capability, {"COUNT": 14336, "AT_ONCE": 1024})
    heads = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "WIDTH": 64}
    compile_kernel(fused.rotate_and_store, capability, heads)


def compile_product(capability: int, tiles: ProductTiles) -> None:
    """Compile the product for a tile shape."""
    compile_kernel(
        product.multiply,
        capability,
        {
            "NUM_OUTPUTS": 4096, "NUM_INPUTS": 4096, "HAS_BIAS": True, "HAS_SUMS": True,
            "ROWS": tiles.rows, "OUTPUTS": tiles.outputs, "INPUTS": tiles.inputs,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


if __name__ == "__main__":
    for given in map(int, sys.argv[1:]):
        compile_all(given)
    compile_rest(int(sys.argv[1]))
