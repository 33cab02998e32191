"""One process compiles a kernel; the others wait for it, or compile another."""

from pathlib import Path

import pytest
from filelock import FileLock

from engine.kernels.cpu import compiling, rows
from engine.kernels.cpu import products as compiled
from engine.kernels.cpu.amx import has_tiles
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.compiling import TARGET, Kernel
from engine.kernels.cpu.installed import Heads, kernels_for
from engine.kernels.cpu.targets import X86_TARGETS
from engine.kernels.processor import kind
from engine.models.hf_config import read_spec
from engine.models.loading.kernels_ahead import compile_ahead
from engine.shared.config import BUNDLED_MODEL
from tests.engine.fixtures import AsKind, LoadDriver, MakePrompt, SaveModel


def needs(is_there: bool, feature: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there, reason=f"needs {feature}")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel cache directory."""
    monkeypatch.setattr(compiling, "_cache_directory", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel whose compiled form is a word."""
    monkeypatch.setattr(Kernel, "_compile", lambda _: "compiled")
    return Kernel(rows._swiglu, 4)


def lock_of(kernel: Kernel, directory: Path) -> FileLock:
    return FileLock(directory / f"{kernel._body.__module__}.{kernel._body.__qualname__}.lock")


def test_kernel_compiled_by_other_process_is_awaited_on_first_call(
    directory: Path, kernel: Kernel
) -> None:
    with lock_of(kernel, directory):
        kernel.compile_ahead()
        assert "_compiled" not in vars(kernel)
    assert kernel._compiled == "compiled"


def test_wait_for_compiling_process_times_out(
    directory: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_PATIENCE", 0.1)
    with lock_of(kernel, directory):
        assert kernel._compiled == "compiled"


def test_all_processes_compile_without_file_locks(
    directory: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(FileLock, "acquire", fail)
    assert kernel._compiled == "compiled"


@pytest.mark.parametrize(
    ("name", "as_zen", "as_amx"),
    [("bundled", 6, 5), ("glm4-moe-blocks", 5, 4), ("gpt-oss", 5, 5), ("llama", 4, 4)],
)
@pytest.mark.parametrize(
    "processor",
    [
        pytest.param("amd-avx512-bf16", marks=needs(has_pairs(), "AVX-512 for bfloat16")),
        pytest.param("amx", marks=needs(has_tiles(), "AMX")),
    ],
)
def test_model_calls_kernels_compiled_ahead(
    name: str,
    as_zen: int,
    as_amx: int,
    processor: str,
    as_kind: AsKind,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_kind(processor)
    number = as_amx if processor == "amx" else as_zen
    directory = BUNDLED_MODEL if name == "bundled" else checkpoint(name).directory
    ahead, called, call = list[Kernel](), set[Kernel](), Kernel.__call__

    def noted(kernel: Kernel, shares: int, *arguments: int) -> None:
        called.add(kernel)
        call(kernel, shares, *arguments)

    with monkeypatch.context() as patching:
        patching.setattr(Kernel, "compile_ahead", lambda kernel: ahead.append(kernel))
        compile_ahead(read_spec(directory), draws_tokens=False)
        assert len(ahead) == number - 2
        compile_ahead(read_spec(directory), draws_tokens=True)
        del ahead[: number - 2]
        assert len(ahead) == number
    monkeypatch.setattr(Kernel, "__call__", noted)
    monkeypatch.setattr(compiled, "_agreed", {})  # compare every kernel again
    engine = driver(directory, dtype="bfloat16", fused=True)
    engine.start(0, prompt(20))
    engine.prefill(0)
    if TARGET in X86_TARGETS and TARGET.name == kind().target:
        spec = read_spec(directory)
        heads = Heads(spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.num_kv_heads)
        assert called.union(ahead) <= set(kernels_for(TARGET, [heads])), "images bring them"
    assert {kernel._body.__module__.rpartition(".")[2] for kernel in set(ahead) - called} <= {
        "draws",
        "filtered_draws",
    }


def test_a_kernel_that_fails_to_compile_ahead_is_compiled_on_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Kernel) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Kernel, "compile_ahead", fail)
    compile_ahead(read_spec(BUNDLED_MODEL), draws_tokens=True)
