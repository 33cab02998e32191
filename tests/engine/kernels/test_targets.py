"""Target processors of kernel compilation."""

import os
import subprocess
import sys

import pytest
from numba.core.registry import cpu_target

from engine.kernels.cpu import targets
from engine.kernels.cpu.compiling import TARGET, compiles_for
from engine.kernels.cpu.targets import X86_TARGETS, Target, target_with

AVX512 = frozenset(targets._OF_LEVEL) | {"adx", "clflushopt"}
ZEN_4 = AVX512 | {"avx512bf16", "gfni", "sse4a"}
SAPPHIRE_RAPIDS = ZEN_4 - {"sse4a"} | {"amx-bf16", "amx-int8", "amx-tile", "avx512fp16"}


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (SAPPHIRE_RAPIDS, "amx"),
        (SAPPHIRE_RAPIDS - {"amx-bf16", "amx-int8", "amx-tile"}, "avx512-bf16"),
        (ZEN_4, "avx512-bf16"),
        (AVX512, None),
        (ZEN_4 - {"fma"}, None),
    ],
    ids=["amx", "amx hidden", "zen 4", "skylake", "fma hidden"],
)
def test_machine_gets_first_target_with_supported_features(
    features: frozenset[str], expected: str | None
) -> None:
    found = dict.fromkeys(SAPPHIRE_RAPIDS | ZEN_4, False) | dict.fromkeys(features, True)
    target = target_with(found)
    assert (target and target.name) == expected


def test_numba_compiles_for_the_target_of_this_machine() -> None:
    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    assert processor == TARGET.processor
    if TARGET in X86_TARGETS:
        assert features == TARGET.options
    assert not compiles_for("avx512bf16", "of no processor")


def test_configured_other_processor_has_no_assumed_features() -> None:
    program = "from engine.kernels.cpu.compiling import TARGET; print(TARGET)"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NUMBA_CPU_NAME": "generic"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert printed == f"{Target('own', 'generic', frozenset())!r}\n"
