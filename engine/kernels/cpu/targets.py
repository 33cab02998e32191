"""The processor targets that kernels are compiled for.

There are few, so that kernels compiled on one machine run on others.
"""

from collections.abc import Mapping
from typing import NamedTuple

from llvmlite import binding
from numba import config

from engine.kernels.processor import is_chosen, is_x86, kind

_OWN = "own"
_LEVEL = "x86-64-v4"
_OF_LEVEL = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl",
             "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")  # fmt: skip


class Target(NamedTuple):
    """Processor features that kernels can use."""

    name: str
    """Part of the name of kernel cache directories."""
    processor: str
    """LLVM's name."""
    features: frozenset[str]
    """Features beyond those of the processor; LLVM's names."""

    @property
    def options(self) -> str:
        """The features in LLVM's option syntax."""
        return ",".join(("-prefer-256-bit", *(f"+{each}" for each in sorted(self.features))))


_PAIRS = frozenset({"avx512bf16"})
X86_TARGETS = (
    Target("amx", _LEVEL, _PAIRS | {"amx-bf16", "amx-tile"}),
    Target("avx512-bf16", _LEVEL, _PAIRS),
)
"""Targets of processors on which kernels are used, most features first."""


def target_with(found: Mapping[str, bool], first: str = "amx") -> Target | None:
    """Return the first x86 target, starting with `first`, whose features a machine has."""
    names = [target.name for target in X86_TARGETS]
    candidates = X86_TARGETS[names.index(first) :] if first in names else ()
    return next(
        (
            each
            for each in candidates
            if all(found.get(name) for name in (*_OF_LEVEL, *each.features))
        ),
        None,
    )


def compile_for_this_machine() -> Target:
    """Set Numba's target for this machine, and return it.

    A machine without the features of any target is its own target. `NUMBA_CPU_NAME` and
    `NUMBA_CPU_FEATURES` take precedence; then no features are known. Must be called before the
    first function is decorated.
    """
    if config.CPU_NAME or config.CPU_FEATURES:
        return Target(_OWN, config.CPU_NAME or "", frozenset())
    found = binding.get_host_cpu_features()
    first = kind().target if is_chosen() else X86_TARGETS[0].name
    target = target_with(found, first) if is_x86() else None
    if target is None:
        every = frozenset(name for name, is_there in found.items() if is_there)
        return Target(_OWN, binding.get_host_cpu_name(), every)
    config.CPU_NAME, config.CPU_FEATURES = target.processor, target.options
    return target
