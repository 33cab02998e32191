"""Memory kept for the next step, and memory allocated only when used."""

import ctypes
import resource

import pytest
import torch

from engine.runner.host_memory import keep_freed_memory, untouched_zeros


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_reused_without_page_faults() -> None:
    keep_freed_memory()

    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        logits = torch.ones(64, 32_000, dtype=torch.bfloat16)
        torch.softmax(logits, dim=-1, dtype=torch.float32)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages_of_a_step = 64 * 32_000 * 6 // 4096
    faults = [faults_of_a_step() for _ in range(20)]
    assert sum(faults[10:]) < pages_of_a_step


def test_zeros_can_be_written_and_keep_their_neighbours() -> None:
    zeros = untouched_zeros((1000, 3, 512), torch.bfloat16)
    zeros[500, 1] = 2.0
    assert zeros.sum() == 2.0 * 512
    assert zeros[500, 1, 7] == 2.0
