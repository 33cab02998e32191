"""Which processor kernels are compiled for."""

import itertools
import os
import subprocess
import sys

import pytest
from llvmlite import binding
from numba.core.registry import cpu_target

from engine.models.kernels.architecture import is_x86
from engine.models.kernels.compiling import TARGET, compiles_for
from engine.models.kernels.targets import X86_TARGETS, Target, target_with

AVX2 = X86_TARGETS[-1].features
AVX512 = AVX2 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "adx", "clflushopt"}
ZEN_4 = AVX512 | {"avx512bf16", "avx512vbmi", "avx512vbmi2", "avx512vnni", "gfni", "sse4a"}
SAPPHIRE_RAPIDS = ZEN_4 - {"sse4a"} | {"amx-bf16", "amx-int8", "amx-tile", "avx512fp16"}


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (SAPPHIRE_RAPIDS, "amx"),
        (SAPPHIRE_RAPIDS - {"amx-bf16", "amx-int8", "amx-tile"}, "avx512-bf16"),
        (ZEN_4, "avx512-bf16"),
        (AVX512 | {"avx512bf16", "avx512vnni"}, "avx512"),
        (AVX512, "avx512"),
        (AVX2 | {"sse4a"}, "avx2"),
        (AVX2 - {"fma"}, None),
    ],
    ids=["amx", "amx hidden", "zen 4", "cooper lake", "skylake", "zen 3", "old"],
)
def test_a_machine_gets_the_first_target_of_which_it_has_all_features(
    features: frozenset[str], expected: str | None
) -> None:
    found = dict.fromkeys(SAPPHIRE_RAPIDS | ZEN_4, False) | dict.fromkeys(features, True)
    target = target_with(found)
    assert (target and target.name) == expected


def test_each_target_has_what_those_behind_it_have() -> None:
    for one, behind in itertools.pairwise(X86_TARGETS):
        assert one.features > behind.features


def test_features_that_are_not_named_are_turned_off() -> None:
    known = dict.fromkeys(["sse", "gfni", "avx"], True)
    assert Target("any", "znver4", frozenset({"sse", "avx"})).options(known) == "+avx,-gfni,+sse"


@pytest.mark.skipif(not is_x86(), reason="has no features of x86")
def test_llvm_knows_all_features() -> None:
    assert binding.get_host_cpu_features().keys() >= X86_TARGETS[0].features


def test_numba_compiles_for_the_target_of_this_machine() -> None:
    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    assert processor == TARGET.processor
    used = {each[1:] for each in features.split(",") if each.startswith("+")}
    assert used == TARGET.features
    assert not compiles_for("avx512bf16", "of no processor")


def test_another_processor_may_be_chosen_of_which_nothing_is_assumed() -> None:
    program = "from engine.models.kernels.compiling import TARGET; print(TARGET)"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NUMBA_CPU_NAME": "generic"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert printed == f"{Target('own', 'generic', frozenset())!r}\n"
