"""One process compiles a kernel; the others wait for it, or compile another."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kernels.cpu import products as compiled
from engine.kernels.cpu.amx import has_tiles
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.claims import claimed
from engine.kernels.cpu.compiling import TARGET, Kernel
from engine.kernels.cpu.installed import Heads, kernels_for
from engine.kernels.cpu.targets import X86_TARGETS
from engine.kernels.processor import kind
from engine.models.hf_config import read_spec
from engine.models.loading.kernels_ahead import compile_ahead
from engine.shared.config import BUNDLED_MODEL
from tests.engine.fixtures import AsKind, LoadDriver, MakePrompt, SaveModel

HOLDER = """
import sys
from engine.kernels.cpu.claims import claimed
with claimed(sys.argv[1], 0) as is_ours:
    print(is_ours, flush=True)
    sys.stdin.read()
"""


def needs(is_there: bool, feature: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there, reason=f"needs {feature}")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the claim on `claim`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "claim")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_what_nobody_holds_can_be_claimed_again_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(str(tmp_path / "claim"), 0) as is_ours:
            assert is_ours


@pytest.mark.stack
def test_what_another_process_holds_is_waited_for_no_longer_than_patience(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    for patience in (0.0, 0.1):
        begun = time.monotonic()
        with claimed(str(tmp_path / "claim"), patience) as is_ours:
            assert not is_ours
        assert time.monotonic() - begun >= patience


@pytest.mark.stack
def test_a_claim_ends_with_its_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    threading.Timer(0.05, holder.kill).start()
    with claimed(str(tmp_path / "claim"), 60) as is_ours:
        assert is_ours


@pytest.mark.parametrize("path", [None, "missing/claim"])
def test_where_nothing_can_be_claimed_everybody_goes_on(path: str | None, tmp_path: Path) -> None:
    with claimed(path and str(tmp_path / path), 0) as is_ours:
        assert is_ours


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
def test_a_model_calls_what_was_compiled_ahead_of_it(
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
    monkeypatch.setattr(compiled, "_agreed", {})  # every kernel is compared again, or called
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


def test_a_compiler_that_fails_ahead_is_left_to_whoever_needs_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Kernel) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Kernel, "compile_ahead", fail)
    compile_ahead(read_spec(BUNDLED_MODEL), draws_tokens=True)
