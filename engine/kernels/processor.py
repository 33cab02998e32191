"""Which kind of processor computes, and what is faster there.

    python -m engine.kernels.processor    # prints it

Whatever computes is right on every kind; the kind decides which of two right ways serves. It is
never timed at the start, so that all engines on processors of one kind agree.
benchmarks/results/measurements.md has the figures.

`SWELL_PROCESSOR=avx512` has programs choose as on another kind, as far as this processor's
instructions allow. It is for finding out what happens there; speed and rounding stay this one's.
"""

import os
import platform
import sys
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

VARIABLE = "SWELL_PROCESSOR"
_CPU_INFO = Path("/proc/cpuinfo")


class Kind(StrEnum):
    """Processors that compute with the same instructions at similar relative speed."""

    AMX = "amx"
    """Intel's with a unit for matrices of bfloat16: Sapphire Rapids and later."""
    AMD_AVX512_BF16 = "amd-avx512-bf16"
    """Zen 4 and later, which multiply pairs of bfloat16 twice as fast as float32."""
    AVX512_BF16 = "avx512-bf16"
    """Intel's with AVX-512 for bfloat16 whose matrix unit is missing or hidden."""
    AVX512 = "avx512"
    AMD_AVX2 = "amd-avx2"
    """Zen 3 and earlier."""
    AVX2 = "avx2"
    """All other x86 processors without AVX-512."""
    BF16 = "bf16"
    """Of other architectures, with instructions for bfloat16."""
    OTHER = "other"

    @property
    def target(self) -> str:
        """The name of the first target (`engine.kernels.cpu.targets`) to compile for."""
        return self.removeprefix("amd-")


def is_x86() -> bool:
    """Whether the processors are x86 with 64 bits."""
    return platform.machine() in ("x86_64", "AMD64")


def is_chosen() -> bool:
    """Whether the kind was set rather than found."""
    return bool(os.environ.get(VARIABLE))


@cache
def kind() -> Kind:
    """Return the kind that is set, else this processor's.

    Raises:
        ValueError: no kind of this architecture has the name that is set.
    """
    if not is_chosen():
        return found_kind()
    name = os.environ[VARIABLE]
    known = [each for each in Kind if is_x86() != (each in (Kind.BF16, Kind.OTHER))]
    if name not in known:
        raise ValueError(f"{VARIABLE}={name}: has to be one of {', '.join(known)}")
    return Kind(name)


def found_kind() -> Kind:
    """Return this processor's kind, whatever is set."""
    if not is_x86():
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        # Without oneDNN nothing is assumed.
        is_fit = not has_onednn or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return Kind.BF16 if is_fit else Kind.OTHER
    if torch.cpu._is_amx_tile_supported():
        return Kind.AMX
    if not torch.cpu._is_avx512_supported():
        return Kind.AMD_AVX2 if torch.cpu._is_avx2_supported() and _is_amd() else Kind.AVX2
    if not torch.cpu._is_avx512_bf16_supported():
        return Kind.AVX512
    return Kind.AMD_AVX512_BF16 if _is_amd() else Kind.AVX512_BF16


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in _CPU_INFO.read_text()
    except OSError:
        return False


ALL_ROWS = sys.maxsize


class FasterKernels(NamedTuple):
    """Where our kernels are faster than torch's operators, by measurement on a kind."""

    product_rows: int
    """Rows up to which products of bfloat16 are; `ALL_ROWS`: always."""
    prompt_attention: bool
    """Whether attention to prompts is, where a kernel attends to them."""


MEASURED: Mapping[Kind, FasterKernels] = {
    Kind.AMX: FasterKernels(product_rows=32, prompt_attention=False),
    Kind.AMD_AVX512_BF16: FasterKernels(product_rows=ALL_ROWS, prompt_attention=True),
}
"""Kinds on which norms, gates, rotation, attention of decodes and draws are faster, too.

On others torch's operators serve. `python -m benchmarks.kernel_choice` compares and prints a row.
"""


def kernels_are_faster(device: torch.device) -> bool:
    """Whether our kernels serve on this device: of processors, on kinds that were measured."""
    return device.type != "cpu" or kind() in MEASURED


def product_rows() -> int:
    """Return up to how many rows a kernel computes products faster than oneDNN."""
    faster = MEASURED.get(kind())
    return 0 if faster is None else faster.product_rows


def kernel_attends_to_prompts() -> bool:
    """Whether a kernel attends to prompts faster than torch's operators."""
    faster = MEASURED.get(kind())
    return faster is not None and faster.prompt_attention


def has_matrix_unit() -> bool:
    """Whether this processor multiplies tiles of 16-bit floats (AMX)."""
    return kind() is Kind.AMX


def float32_is_faster() -> bool:
    """Whether this processor multiplies float32 faster than 16-bit floats, once both are cached.

    Intel's cores without AMX have half as many units for pairs of bfloat16 as for float32, so that
    the two are equal but for the conversions; AMD's since Zen 4 have as many. Other x86 processors,
    and ARM's without instructions for bfloat16 (Neoverse N1, Apple M1), convert every number. What
    ARM's with them do was not measured.
    """
    return kind() not in (Kind.AMX, Kind.AMD_AVX512_BF16, Kind.BF16)


def is_invariance_cheap() -> bool:
    """Whether products that do not depend on the number of rows cost little, in float32.

    AMD's processors with AVX2 alone add up nearly all numbers of rows in one order. What others do
    was measured with AMX, where prompts take twice as long, or not at all.
    """
    return kind() is Kind.AMD_AVX2


def is_invariance_free() -> bool:
    """Whether kernels that compute each row by itself are the fastest way for all rows anyway."""
    return product_rows() == ALL_ROWS and kernel_attends_to_prompts()


def has_16_bit_kernels() -> bool:
    """Whether oneDNN has kernels that read and write 16-bit floats here.

    Of x86 processors those with AVX-512 have them, of ARM's those with instructions for bfloat16.
    On others oneDNN refuses, or falls back on reference code that takes a hundred times as long.
    """
    return kind() not in (Kind.AMD_AVX2, Kind.AVX2, Kind.OTHER)


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
    for each token again (`engine.models.products.blocked`).
    """
    if device.type != "cpu":
        return 0.005
    if has_16_bit_kernels():
        return 0.03
    return 0.4 if in_16_bits else 0.1


if __name__ == "__main__":
    chosen, found = kind(), found_kind()
    print(f"processor: {found}" if chosen == found else f"processor: {found}, taken for {chosen}")
