"""Weights sent by a trainer: accepted messages, and peers that disconnect."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.batch import CannotDo
from engine.batch.weight_transfer import WeightTransfer, announced_tensors
from engine.distributed.plain import PlainGroup, join_plain_group
from engine.distributed.spec import GroupBroken, GroupSpec, listener_address, open_listener
from engine.models.formats.files import TensorFiles
from tests.support.waiting import PATIENCE, until

CPU = torch.device("cpu")
WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("names", "types", "shapes", "reason"),
    [
        (["a", "b"], ["float32"], [[1], [1]], "equal lengths: they have 2, 1 and 2"),
        (["a"], ["float64"], [[1]], "a is of type float64; it can be bfloat16, float16, float32"),
        (["a"], ["__class__"], [[1]], "is of type __class__"),
        (["a", "a"], ["float32"] * 2, [[1], [1]], "a appears twice"),
        (["a"], ["float32"], [[4, -1]], r"cannot have the shape \[4, -1\]"),
        (["a"], ["float32"], [[1 << 39, 1 << 39]], "cannot have the shape"),
    ],
)
def test_unsupported_tensors_are_refused_by_name(
    names: list[str], types: list[str], shapes: list[list[int]], reason: str
) -> None:
    with pytest.raises(CannotDo, match=reason):
        announced_tensors(names, types, shapes)


def accepted(tensors: TensorFiles) -> None:
    """Accept every name that contains an "a"."""
    if "a" not in tensors.shapes:
        raise CannotDo("a is missing")


class Pair:
    """An engine's endpoint and a trainer connected to it."""

    def __init__(self) -> None:
        self.transfer = WeightTransfer(CPU, 20, accepted)
        self.meet()

    def meet(self) -> None:
        listener = open_listener("127.0.0.1")
        address = listener_address(listener)
        self.transfer.join(GroupSpec(address, 1, 2, 0, PATIENCE))
        self.group: PlainGroup | None = join_plain_group(
            GroupSpec(address, 0, 2, 0, PATIENCE), CPU, listener
        )
        until(lambda: self.transfer.phase == "joined", "they have met")

    def announce(self, weights: dict[str, Tensor]) -> None:
        self.transfer.receive(
            list(weights),
            [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            [list(each.shape) for each in weights.values()],
        )

    def send(self, weights: dict[str, Tensor]) -> None:
        self.announce(weights)
        assert self.group is not None
        for each in weights.values():
            self.group.broadcast(each.clone())
        until(lambda: self.transfer.phase != "receiving", "it has come")


def test_received_weights_can_be_taken_once() -> None:
    pair = Pair()
    with pytest.raises(CannotDo, match="sent nothing"):
        pair.transfer.take()
    pair.send(WEIGHTS)
    taken = pair.transfer.take()
    assert taken.types == {"a": "F32", "b": "BF16"}
    assert all(torch.equal(taken.tensor(name), each) for name, each in WEIGHTS.items())
    with pytest.raises(CannotDo, match="sent nothing"):
        pair.transfer.take()


def test_update_is_received_in_parts() -> None:
    pair = Pair()
    pair.send({"a": WEIGHTS["a"] + 1})
    pair.transfer.start()
    pair.send({"b": WEIGHTS["b"]})
    pair.send({"a": WEIGHTS["a"]})
    taken = pair.transfer.take()
    assert set(taken.shapes) == {"a", "b"}
    assert torch.equal(taken.tensor("a"), WEIGHTS["a"])
    assert not pair.transfer.is_open


def test_tensors_that_do_not_fit_model_are_refused_before_transfer() -> None:
    pair = Pair()
    with pytest.raises(CannotDo, match="a is missing"):
        pair.announce({"b": WEIGHTS["b"]})
    pair.transfer.start()
    pair.send({"b": torch.ones(15)})
    with pytest.raises(CannotDo, match="21 values are more than the 20"):
        pair.announce({"a": WEIGHTS["a"]})


def test_trainer_leaving_during_transfer_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.announce(WEIGHTS)
    with pytest.raises(CannotDo, match="already sending"):
        pair.announce(WEIGHTS)
    with pytest.raises(CannotDo, match="already sending"):
        pair.transfer.take()
    assert pair.group is not None
    pair.group.broadcast(WEIGHTS["a"].clone())
    pair.group = None
    until(lambda: pair.transfer.phase == "none", "the engine sees it")
    assert pair.transfer.num_received == 0
    with pytest.raises(CannotDo, match=r"not joined a trainer: the group has ended: .* by peer"):
        pair.announce(WEIGHTS)
    pair.meet()
    pair.send(WEIGHTS)
    assert set(pair.transfer.take().shapes) == {"a", "b"}


def test_engine_that_leaves_unblocks_trainer() -> None:
    pair = Pair()
    pair.transfer.leave()
    group = pair.group
    assert group is not None
    with pytest.raises(GroupBroken, match="by peer"):
        group.broadcast(WEIGHTS["a"].clone())


def test_join_times_out_without_trainer() -> None:
    transfer = WeightTransfer(CPU, 20, accepted)
    with open_listener("127.0.0.1") as listener:
        address = listener_address(listener)
    transfer.join(GroupSpec(address, 1, 2, 0, 0.5))
    until(lambda: transfer.phase == "none", "it gives up")
    assert f"met nobody, or not all, at {address} within 0.5 s" in transfer.error


def test_trainer_needs_only_torch() -> None:
    transfer = WeightTransfer(CPU, 20, accepted)
    dist: Any = torch.distributed  # of whose interface there are stubs for a part only
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    transfer.join(GroupSpec(address, 1, 2, 0, PATIENCE))
    scope = dist.PrefixStore(f"tcp://{address}", store)
    group = dist.ProcessGroupGloo(scope, 0, 2, timedelta(seconds=PATIENCE))
    until(lambda: transfer.phase == "joined", "they have met")
    transfer.receive(["a"], ["float32"], [[2, 3]])
    sender = threading.Thread(target=lambda: group.broadcast([WEIGHTS["a"].clone()]).wait())
    sender.start()
    until(lambda: transfer.num_received == 1, "it has come")
    sender.join()
    assert torch.equal(transfer.take().tensor("a"), WEIGHTS["a"])
