"""When sampling uses the kernel, and when it does not."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.cpu import draws
from engine.runner.compiled_draws import drawing_for
from engine.runner.filters import WITH_TORCH
from engine.shared.config import BUNDLED_MODEL
from tests.engine.serving import SOME_TEXT, request, serve

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the kernel."""
    found: list[int] = []
    kernel: Callable[..., None] = draws.draw

    def counted(*arguments: int) -> None:
        found.append(arguments[-2])
        kernel(*arguments)

    monkeypatch.setattr(draws, "draw", counted)
    return found


@pytest.mark.usefixtures("as_zen4")  # kernels draw on some kinds of processors only
@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "enforce_eager": True}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_bfloat16_models_are_sampled_by_kernel_unless_disabled(
    options: dict[str, Any], is_compiled: bool, calls: list[int]
) -> None:
    (answer,), _ = serve(BUNDLED_MODEL, [request(1, SOME_TEXT[:5], max_tokens=4)], **options)
    assert len(answer.tokens) == 4
    assert bool(calls) == is_compiled


def test_devices_and_other_dtypes_use_torch() -> None:
    assert drawing_for(torch.bfloat16, torch.device("cuda")) is WITH_TORCH
    assert drawing_for(torch.float16, CPU) is WITH_TORCH


def test_torch_samples_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert drawing_for.__wrapped__(torch.bfloat16, CPU) is WITH_TORCH


def test_a_kernel_that_draws_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_arguments: int) -> None:
        """Do not write the target, whose memory is arbitrary."""

    monkeypatch.setattr(draws, "draw", nothing)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    made = drawing_for.__wrapped__(torch.bfloat16, CPU)
    assert made is WITH_TORCH
    assert made.unfiltered(torch.tensor([[0.0, 9.0]]), np.ones(1), np.array([0.5])).tolist() == [1]
