"""Storage of compiled kernels, their threads, and when they are not used."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import compiling
from engine.kernels.cpu.rows import CompiledKernels, swiglu
from engine.kernels.registry import fused_kernels
from tests.support.openmp import environment_without_openmp

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROGRAM = """
import sys
if sys.argv[1] == "llvm":
    from engine.executor.environment import load_openmp
    assert load_openmp()
import torch
torch.set_num_threads(2)
from engine.kernels.cpu import rows
from engine.kernels.registry import fused_kernels
kernels = fused_kernels(torch.bfloat16, torch.device("cpu"))
x = torch.randn(100, 2000, generator=torch.Generator().manual_seed(0)).bfloat16()
print(kernels.swiglu(x).view(torch.uint8).long().sum().item())
print(*(name for name in sys.argv[2:] if not getattr(rows, name)._compiled.cache_hits))
"""
ROWS = ("rms_norm", "rms_norm_heads", "rotate_and_store", "swiglu")


@pytest.mark.stack
def test_kernels_are_compiled_once_cached_per_user_and_run_on_either_runtime(
    tmp_path: Path,
) -> None:
    """Two processes that start together divide the compilations."""
    cache = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    together = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, runtime, *ROWS],
            env=environment_without_openmp() | cache, stdout=subprocess.PIPE, text=True,
        )
        for runtime in ("torch's own", "llvm")
    ]  # fmt: skip
    told = [each.communicate(timeout=120)[0].splitlines() for each in together]
    assert len({total for total, _ in told}) == 1
    assert sorted(name for _, names in told for name in names.split()) == list(ROWS)
    (directory,) = (tmp_path / "swell" / "kernels").iterdir()
    assert directory.name.endswith(f"-{compiling.TARGET.name}")
    assert directory.stat().st_mode & 0o077 == 0
    compiled = sorted(path.name.partition("-")[0] for path in directory.rglob("*.nbc"))
    assert compiled == [f"rows._{name}" for name in ROWS]


@pytest.mark.parametrize("shares", [1, 2, 7])
def test_all_rows_are_computed_by_any_number_of_threads(shares: int) -> None:
    x, out = torch.randn(5, 64).bfloat16(), torch.zeros(5, 32).bfloat16()
    swiglu(shares, x.data_ptr(), out.data_ptr(), 5, 32)
    assert torch.equal(out, CompiledKernels().swiglu(x))


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float32, CPU), (torch.float16, CPU), (torch.bfloat16, CUDA)]
)
def test_other_dtypes_and_devices_have_no_kernels(dtype: torch.dtype, device: torch.device) -> None:
    assert fused_kernels(dtype, device) is None


def test_no_kernels_without_numba(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.INFO):
        assert fused_kernels(torch.bfloat16, CPU) is None
    assert "torch's own, without numba" in caplog.text


def wrong_gates(_kernels: CompiledKernels, gate_up: Tensor) -> Tensor:
    return gate_up[:, : gate_up.shape[1] // 2]


def no_rotation(_kernels: CompiledKernels, qkv: Tensor, *_others: Tensor) -> None:
    """Leave everything as it is."""


def rotation_alone(
    kernels: CompiledKernels, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Rotate, and store elsewhere."""
    CompiledKernels.rotate_and_store(kernels, qkv, cos, sin, torch.empty_like(cache), slots)


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("swiglu", wrong_gates),
        ("rotate_and_store", no_rotation),
        ("rotate_and_store", rotation_alone),
    ],
)
def test_kernels_that_differ_are_not_used(
    kernel: str,
    wrong: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert fused_kernels(torch.bfloat16, CPU) is not None
    replaced = type("Wrong", (CompiledKernels,), {kernel: wrong})
    monkeypatch.setattr("engine.kernels.cpu.rows.CompiledKernels", replaced)
    assert fused_kernels(torch.bfloat16, CPU) is None
    assert "between products are torch's own: fused kernels differ" in caplog.text


def test_compilation_failure_is_logged_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("torch bundles no OpenMP runtime")

    monkeypatch.setattr(compiling, "_openmp", fail)
    assert fused_kernels(torch.bfloat16, CPU) is None
    assert "torch bundles no OpenMP runtime" in caplog.text
