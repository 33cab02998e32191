"""What the processor multiplies fast; benchmarks/results/measurements.md has the measurements."""

from functools import cache
from pathlib import Path

import torch

from engine.models.kernels.architecture import is_x86

_CPU_INFO = Path("/proc/cpuinfo")


def has_matrix_unit() -> bool:
    """Whether this processor multiplies tiles of 16-bit floats (AMX)."""
    return torch.cpu._is_amx_tile_supported()


@cache
def float32_is_faster() -> bool:
    """Whether this processor multiplies float32 faster than 16-bit floats, once both are cached.

    Intel's cores without AMX have half as many units for pairs of bfloat16 as for float32, so that
    the two are equal but for the conversions; AMD's since Zen 4 have as many. Other x86 processors,
    and ARM's without instructions for bfloat16 (Neoverse N1, Apple M1), convert every number. What
    ARM's with them do was not measured.
    """
    if not is_x86():
        return not has_16_bit_kernels()
    return not (has_matrix_unit() or (torch.cpu._is_avx512_bf16_supported() and _is_amd()))


def is_invariance_cheap() -> bool:
    """Whether products that do not depend on the number of rows cost little, in float32.

    AMD's processors with AVX2 alone add up nearly all numbers of rows in one order. What others do
    was measured with AMX, where prompts take twice as long, or not at all.
    """
    if not is_x86() or torch.cpu._is_avx512_supported():
        return False
    return torch.cpu._is_avx2_supported() and _is_amd()


def has_16_bit_kernels() -> bool:
    """Whether oneDNN has kernels that read and write 16-bit floats here.

    Of x86 processors those with AVX-512 have them, of ARM's those with instructions for bfloat16.
    On others oneDNN refuses, or falls back on reference code that takes a hundred times as long.
    Without oneDNN nothing is assumed.
    """
    if not is_x86():
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return not has_onednn or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_supported()


def type_of_long_rows(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which rows of many tokens attend fastest.

    On processors without a unit for matrices of 16-bit floats torch converts tile by tile, which
    takes a third longer than to convert once and compute in float32.
    """
    return torch.float32 if device.type == "cpu" and not has_matrix_unit() else dtype


def row_price(device: torch.device, *, in_16_bits: bool) -> float:
    """Return what one more token costs in a step of few, as a part of a step of one.

    A step of one token waits for the weights. Devices multiply what they have read by hundreds of
    tokens in the meantime, processors by some; products take as long for five tokens as for eight,
    so this is a mean. Where there is no arithmetic for them, weights of 16 bits are multiplied
    for each token anew (`engine.models.products.blocked`).
    """
    if device.type != "cpu":
        return 0.005
    if has_16_bit_kernels():
        return 0.03
    return 0.4 if in_16_bits else 0.1


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in _CPU_INFO.read_text()
    except OSError:
        return False
