"""`pytest --processor avx512`: emulate another kind of processor.

The engine chooses as on that kind (`engine.kernels.processor`), and torch and oneDNN are restricted
to its instructions, in the test process and its children. Instructions that this processor lacks
are not emulated: as "amx" without a matrix unit, products are oneDNN's.
"""

import os

import pytest

_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
_VARIABLES: dict[str, dict[str, str]] = {
    "amx": {},
    "amd-avx512-bf16": _BF16,
    "avx512-bf16": _BF16,
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "amd-avx2": _AVX2,
    "avx2": _AVX2,
}


def add_option(parser: pytest.Parser) -> None:
    """Add `--processor`."""
    parser.addoption(
        "--processor", choices=_VARIABLES, help="compute as this kind of x86 processor does"
    )


def configure(config: pytest.Config) -> None:
    """Set the variables, which libraries read when they are loaded."""
    name = config.getoption("processor")
    if name is not None:
        os.environ.update({"SWELL_PROCESSOR": name, **_VARIABLES[name]})
