"""The processors that kernels are compiled for.

They are few, and each is a set of features that many processors have: what was compiled on one
machine runs on others.
"""

from collections.abc import Mapping
from typing import NamedTuple

from llvmlite import binding
from numba import config

from engine.models.kernels.architecture import is_x86

_OWN = "own"


class Target(NamedTuple):
    """What kernels may ask of a processor."""

    name: str
    """Of directories where kernels for it are kept."""
    processor: str
    """Instructions are ordered for it; LLVM's name."""
    features: frozenset[str]
    """LLVM's names; no other ones are used."""

    def options(self, known: Mapping[str, bool]) -> str:
        """Return these features, and none of the others that LLVM knows, as it takes them."""
        return ",".join(f"{'+' if each in self.features else '-'}{each}" for each in sorted(known))


_AVX2 = frozenset(
    [
        "64bit",
        "avx",
        "avx2",
        "bmi",
        "bmi2",
        "cmov",
        "crc32",
        "cx16",
        "cx8",
        "f16c",
        "fma",
        "fxsr",
        "lzcnt",
        "mmx",
        "movbe",
        "popcnt",
        "sahf",
        "sse",
        "sse2",
        "sse3",
        "sse4.1",
        "sse4.2",
        "ssse3",
        "xsave",
    ]
)
_AVX512 = _AVX2 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _AVX512 | {"avx512bf16", "avx512vbmi", "avx512vbmi2", "avx512vnni"}

X86_TARGETS = (
    Target("amx", "sapphirerapids", _BF16 | {"amx-bf16", "amx-tile"}),
    Target("avx512-bf16", "znver4", _BF16),
    Target("avx512", "skylake-avx512", _AVX512),
    Target("avx2", "haswell", _AVX2),
)
"""The one with most features first."""


def target_with(found: Mapping[str, bool]) -> Target | None:
    """Return the first target of x86 whose features are all found on a machine."""
    return next(
        (target for target in X86_TARGETS if all(found.get(each) for each in target.features)),
        None,
    )


def compile_for_this_machine() -> Target:
    """Have Numba compile for this machine's target, and return that.

    A machine that has the features of none is a target of its own. `NUMBA_CPU_NAME` and
    `NUMBA_CPU_FEATURES` are obeyed; then no features are known. It has no effect on what Numba
    compiles once a function has been marked.
    """
    if config.CPU_NAME or config.CPU_FEATURES:
        return Target(_OWN, config.CPU_NAME or "", frozenset())
    found = binding.get_host_cpu_features()
    target = target_with(found) if is_x86() else None
    if target is None:
        every = frozenset(name for name, is_there in found.items() if is_there)
        return Target(_OWN, binding.get_host_cpu_name(), every)
    config.CPU_NAME, config.CPU_FEATURES = target.processor, target.options(found)
    return target
