"""Tensors keep their values, and what they share, while their memory is free."""

from functools import partial

import msgspec
import pytest
import torch
from torch import Tensor

from engine.executor.offloading import offload

CPU = torch.device("cpu")


class Layer(msgspec.Struct, frozen=True):
    weight: Tensor


class Product:
    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight


def test_whatever_holds_a_tensor_holds_it_again() -> None:
    every = [torch.randn(4, 6) for _ in range(7)]
    in_struct, in_slots, in_partial, in_closure, in_default, in_method, kept = every
    tied, row = in_struct.T, in_slots[1]
    expected = [each.clone() for each in (*every, tied, row)]

    def closure() -> Tensor:
        return in_closure

    def default(value: Tensor = in_default) -> Tensor:
        return value

    balance = {"load": kept}
    model = {
        "layers": [Layer(in_struct), Product(in_slots), tied, row],
        "functions": (partial(torch.add, in_partial), closure, default, Product(in_method).__dir__),
        "balance": balance,
    }
    offloaded = offload([model], CPU, kept=[balance])
    assert offloaded is not None
    assert [each.untyped_storage().nbytes() for each in every] == [0] * 6 + [96]
    offloaded.restore()
    for each, before in zip((*every, tied, row), expected, strict=True):
        assert torch.equal(each, before)
    assert tied.data_ptr() == in_struct.data_ptr()
    in_slots[1] = 5
    assert torch.equal(row, in_slots[1])


def test_tensors_elsewhere_stay() -> None:
    weight = torch.ones(3)
    offloaded = offload([weight], torch.device("meta"))
    assert offloaded is not None
    assert weight.tolist() == [1, 1, 1]


def test_without_room_on_the_host_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of memory")

    weight = torch.ones(3)
    monkeypatch.setattr(torch, "empty", fail)
    assert offload([weight], CPU) is None
    assert weight.tolist() == [1, 1, 1]
    assert "weights are not kept in the host's memory: out of memory" in caplog.text
