"""Kernels are used on kinds of processors on which they were measured to be faster."""

import pytest

from engine.batch.batch import BatchPlan, SlotBlocks, SlotStart
from engine.executor.in_process import InProcessExecutor
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.compiling import Kernel
from engine.kernels.processor import MEASURED, Kind, is_x86
from engine.models.attention.fused import FusedAttention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.patches import PatchAttention
from engine.shared.config import (
    BUNDLED_MODEL,
)
from engine.shared.messages import SamplingParams
from tests.engine.configs import config_of
from tests.engine.fixtures import AsKind

pytestmark = [
    pytest.mark.processor,
    pytest.mark.skipif(not is_x86(), reason="the other kinds are of x86"),
]
X86_KINDS = [each for each in Kind if each not in (Kind.BF16, Kind.OTHER)]


def served(batch_invariant: bool | None = None) -> InProcessExecutor:
    """Return an executor that has computed a prompt, and sampled with and without a filter."""
    executor = InProcessExecutor(
        config_of(
            BUNDLED_MODEL,
            model={"dtype": "bfloat16"},
            cache={"block_size": 16, "num_kv_blocks": 64},
            executor={"batch_invariant": batch_invariant},
        )
    )
    for top_p in (1.0, 0.9):
        params = SamplingParams(max_tokens=9, seed=4, top_p=top_p)
        starting = [SlotStart(1, [5, 6, 7], 3, params)]
        plan = BatchPlan(0, starting, [SlotBlocks(1, 0, [3, 1])], [1], [0], [3], [True])
        assert len(executor.submit(plan).result().token_ids) == 1
    return executor


@pytest.mark.parametrize("name", X86_KINDS)
def test_unmeasured_processors_use_no_kernels(
    name: Kind, as_kind: AsKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_kind(name)
    called = set[Kernel]()
    call = Kernel.__call__

    def noted(kernel: Kernel, shares: int, *arguments: int) -> None:
        called.add(kernel)
        call(kernel, shares, *arguments)

    monkeypatch.setattr(Kernel, "__call__", noted)
    served().shutdown()
    assert bool(called) is (name in MEASURED)


@pytest.mark.skipif(not has_pairs(), reason="needs AVX-512 for bfloat16")
@pytest.mark.parametrize(
    ("name", "batch_invariant", "expected"),
    [
        ("amd-avx512-bf16", None, PatchAttention),
        ("amx", None, FusedAttention),
        ("amx", True, PatchAttention),
        ("avx512-bf16", None, PagedAttention),
    ],
)
def test_prompts_use_faster_attention_unless_batch_invariant(
    name: str, batch_invariant: bool | None, expected: type, as_kind: AsKind
) -> None:
    as_kind(name)
    executor = served(batch_invariant)
    assert type(executor._loaded.model.attention) is expected
    assert executor.info.is_batch_invariant is (expected is PatchAttention)
    executor.shutdown()
