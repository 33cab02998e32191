"""The kind of processor, and which implementations are faster on it.

  python -m engine.kernels.processor    # prints it

All implementations are correct on every kind; the kind decides which of two is used. Nothing is
timed at startup, so all engines on processors of one kind agree. benchmarks/results/measurements.md
has the figures.

`SWELL_PROCESSOR=avx512` makes programs choose as on another kind, as far as this processor's
instructions allow. It is for testing; speed and rounding remain this processor's.
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
    """Processors with the same instructions and similar relative speeds."""

    AMX = "amx"
    """Intel processors with a bfloat16 matrix unit: Sapphire Rapids and later."""
    AMD_AVX512_BF16 = "amd-avx512-bf16"
    """Zen 4 and later, which multiply pairs of bfloat16 twice as fast as float32."""
    AVX512_BF16 = "avx512-bf16"
    """Intel processors with AVX-512 BF16 whose matrix unit is missing or hidden."""
    AVX512 = "avx512"
    AMD_AVX2 = "amd-avx2"
    """Zen 3 and earlier."""
    AVX2 = "avx2"
    """All other x86 processors without AVX-512."""
    BF16 = "bf16"
    """Other architectures with bfloat16 instructions."""
    OTHER = "other"

    @property
    def target(self) -> str:
        """Name of the first target (`engine.kernels.cpu.targets`) to compile for."""
        return self.removeprefix("amd-")


def is_x86() -> bool:
    """Return whether the processor is 64-bit x86."""
    return platform.machine() in ("x86_64", "AMD64")


def is_chosen() -> bool:
    """Return whether the kind is configured rather than detected."""
    return bool(os.environ.get(VARIABLE))


@cache
def kind() -> Kind:
    """Return the configured kind, else this processor's.

    Raises:
        ValueError: the configured name is not a kind of this architecture.
    """
    if not is_chosen():
        return detected_kind()
    name = os.environ[VARIABLE]
    known = [each for each in Kind if is_x86() != (each in (Kind.BF16, Kind.OTHER))]
    if name not in known:
        raise ValueError(f"{VARIABLE}={name}: must be one of {', '.join(known)}")
    return Kind(name)


def detected_kind() -> Kind:
    """Return this processor's kind, ignoring configuration."""
    if not is_x86():
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        # Without oneDNN, assume support.
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
    """Where kernels are faster than torch's operators, as measured on a kind."""

    product_rows: int
    """Maximum rows for which bfloat16 products are faster; `ALL_ROWS`: always."""
    prompt_attention: bool
    """Whether prompt attention is faster, where a kernel supports it."""


MEASURED: Mapping[Kind, FasterKernels] = {
    Kind.AMX: FasterKernels(product_rows=32, prompt_attention=False),
    Kind.AMD_AVX512_BF16: FasterKernels(product_rows=ALL_ROWS, prompt_attention=True),
}
"""Kinds on which norms, gates, rotation, decode attention and sampling are faster too.

On others torch's operators are used. `python -m benchmarks.kernel_choice` compares and prints a
row.
"""


def kernels_are_faster(device: torch.device) -> bool:
    """Return whether kernels are used on this device; on CPUs only for measured kinds."""
    return device.type != "cpu" or kind() in MEASURED


def product_rows() -> int:
    """Return the maximum rows for which a product kernel is faster than oneDNN."""
    faster = MEASURED.get(kind())
    return 0 if faster is None else faster.product_rows


def prompt_kernel_is_faster() -> bool:
    """Return whether an attention kernel is faster for prompts than torch's operators."""
    faster = MEASURED.get(kind())
    return faster is not None and faster.prompt_attention


def has_matrix_unit() -> bool:
    """Return whether this processor multiplies tiles of 16-bit floats (AMX)."""
    return kind() is Kind.AMX


def float32_is_faster() -> bool:
    """Return whether this processor multiplies cached float32 faster than cached 16-bit floats.

    Intel's cores without AMX have half as many units for pairs of bfloat16 as for float32, so the
    two are equal except for conversions; AMD's since Zen 4 have as many. Other x86 processors, and
    ARM's without bfloat16 instructions (Neoverse N1, Apple M1), convert every number. ARM's with
    them were not measured.
    """
    return kind() not in (Kind.AMX, Kind.AMD_AVX512_BF16, Kind.BF16)


def is_invariance_cheap() -> bool:
    """Return whether products independent of the number of rows cost little, in float32.

    AMD's AVX2 processors sum nearly all numbers of rows in one order. Others were measured only
    with AMX, where prompts take twice as long, or not at all.
    """
    return kind() is Kind.AMD_AVX2


def is_invariance_free() -> bool:
    """Return whether row-wise kernels are the fastest for any number of rows."""
    return product_rows() == ALL_ROWS and prompt_kernel_is_faster()


def has_16_bit_kernels() -> bool:
    """Return whether oneDNN has kernels that read and write 16-bit floats here.

    x86 processors with AVX-512 have them, and ARM's with bfloat16 instructions. On others oneDNN
    refuses, or falls back on reference code that is a hundred times slower.
    """
    return kind() not in (Kind.AMD_AVX2, Kind.AVX2, Kind.OTHER)


def type_of_long_rows(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which rows of many tokens attend fastest.

    On processors without a 16-bit matrix unit torch converts tile by tile, which takes a third
    longer than converting once and computing in float32.
    """
    return torch.float32 if device.type == "cpu" and not has_matrix_unit() else dtype


def row_price(device: torch.device, *, in_16_bits: bool) -> float:
    """Return the cost of one more token in a small step, relative to a step of one token.

    A step of one token is bound by reading the weights. In that time devices can multiply them by
    hundreds of tokens, CPUs by several; products take as long for five tokens as for eight, so this
    is a mean. Without 16-bit arithmetic, 16-bit weights are multiplied again per token
    (`engine.models.products.blocked`).
    """
    if device.type != "cpu":
        return 0.005
    if has_16_bit_kernels():
        return 0.03
    return 0.4 if in_16_bits else 0.1


if __name__ == "__main__":
    chosen, found = kind(), detected_kind()
    print(f"processor: {found}" if chosen == found else f"processor: {found}, taken for {chosen}")
