"""Models keep their weights, and shared tensors stay shared, while their memory is released."""

import pytest
import torch
from torch import Tensor, nn

from engine.executor.offloading import offload
from engine.models.module import Module, weight_of

CPU = torch.device("cpu")


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight_of(torch.randn(4, 6))
        self.row = weight_of(self.weight[1])
        self.register_buffer("table", torch.randn(3), persistent=False)
        self.register_buffer("nothing", None)
        self.views = [self.weight[2]]


def test_weights_and_their_views_are_restored() -> None:
    layers = [Layer(), Layer()]
    model = nn.ModuleList(layers)
    every = [*model.parameters(), *model.buffers(), *(layer.views[0] for layer in layers)]
    expected = [each.clone() for each in every]
    offloaded = offload([model, None], CPU)
    assert offloaded is not None
    assert {each.untyped_storage().nbytes() for each in every} == {0}
    offloaded.restore()
    for each, before in zip(every, expected, strict=True):
        assert torch.equal(each, before)
    for layer in layers:
        assert layer.weight[1].data_ptr() == layer.row.data_ptr()


def test_tensors_elsewhere_stay() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    offloaded = offload([model], torch.device("meta"))
    assert offloaded is not None
    assert torch.equal(model.weight, before)


def test_nothing_is_offloaded_without_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of memory")

    model = Layer()
    before = model.weight.clone()
    monkeypatch.setattr(torch, "empty", fail)
    assert offload([model], CPU) is None
    assert torch.equal(model.weight, before)
    assert "weights are not kept in the host's memory: out of memory" in caplog.text
