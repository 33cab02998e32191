"""Weights that a trainer sends to an engine, received concurrently with its steps.

The trainer is rank 0 of a process group, the engines are the other ranks. It announces tensors
before it broadcasts them one by one; names and shapes are those of the checkpoint that the engine
serves. They are kept here until the engine switches to them.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from engine.batch.batch import CannotDo
from engine.distributed.plain import PlainGroup, join_plain_group
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.models.formats.files import TensorFiles

logger = logging.getLogger(__name__)

Phase = Literal["none", "joining", "joined", "receiving"]

_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED}


class SentTensors(TensorFiles):
    """In-memory tensors that replace a checkpoint's files."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors by name; on the device `meta` they have only shape and dtype."""
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.types = {name: _STORED[tensor.dtype] for name, tensor in tensors.items()}
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as received."""
        return self.tensors[name]


def announced_tensors(
    names: Sequence[str], types: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Return the announced tensors, in order, on the device `meta`.

    Raises:
        CannotDo: the list is invalid.
    """
    if not len(names) == len(types) == len(shapes):
        raise CannotDo(
            f"names, dtype_names and shapes must have equal lengths: they have {len(names)}, "
            f"{len(types)} and {len(shapes)}"
        )
    expected: dict[str, Tensor] = {}
    for name, type_name, shape in zip(names, types, shapes, strict=True):
        dtype = _TYPES.get(type_name)
        if dtype is None:
            raise CannotDo(f"{name} is of type {type_name}; it can be {', '.join(_TYPES)}")
        if name in expected:
            raise CannotDo(f"{name} appears twice")
        if not all(0 < size < 1 << 40 for size in shape) or not 0 < prod(shape) < 1 << 40:
            raise CannotDo(f"{name} cannot have the shape {list(shape)}")
        expected[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return expected


class WeightTransfer:
    """An engine's end of the group with a trainer, and the tensors received.

    Methods are called by one thread and return immediately; another thread waits for the trainer.
    An error ends the group and drops received tensors; the trainer must be joined again.
    """

    def __init__(
        self, device: torch.device, max_values: int, check: Callable[[TensorFiles], None]
    ) -> None:
        """Start without a trainer.

        Args:
            device: device of the model.
            max_values: maximum total number of values in an update.
            check: raises CannotDo if a complete update does not fit the model.
        """
        self._device = device
        self._max_values = max_values
        self._check = check
        self._lock = threading.Lock()
        self._generation = 0
        """Incremented by `leave`, so that results of earlier threads are ignored."""
        self._group: PlainGroup | None = None
        self._tensors: dict[str, Tensor] = {}
        self.phase: Phase = "none"
        self.error = ""
        """Why the last group ended."""
        self.is_open = False
        """Whether an update in several parts is in progress."""

    @property
    def num_received(self) -> int:
        """Number of tensors received."""
        return len(self._tensors)

    def join(self, spec: GroupSpec) -> None:
        """Leave the previous trainer, and start joining this one."""
        self.leave()
        self._start_thread("joining", partial(self._join, spec, self._generation))

    def start(self) -> None:
        """Begin an update in several parts; earlier tensors are dropped.

        Raises:
            CannotDo: there is no trainer, or it is sending.
        """
        self._require_joined()
        self._tensors.clear()
        self.is_open = True

    def receive(
        self, names: Sequence[str], types: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Start receiving tensors.

        Raises:
            CannotDo: there is no trainer, or the tensors do not match this model.
        """
        group, expected = self._require_joined(), announced_tensors(names, types, shapes)
        if not self.is_open:
            self._tensors.clear()
            self._check(SentTensors(expected))
        values = sum(each.numel() for each in (*self._tensors.values(), *expected.values()))
        if values > self._max_values:
            raise CannotDo(
                f"{values} values are more than the {self._max_values} that the model has"
            )
        self._start_thread("receiving", partial(self._receive, group, expected, self._generation))

    def take(self) -> SentTensors:
        """Return all received tensors, which ends the update.

        Raises:
            CannotDo: tensors are still arriving, or there are none.
        """
        self._require_joined()
        if not self._tensors:
            raise CannotDo("the trainer has sent nothing")
        tensors, self._tensors = self._tensors, {}
        self.is_open = False
        return SentTensors(tensors)

    def leave(self, reason: str = "the engine left it") -> None:
        """End the group and abort pending transfers; the trainer's collectives then fail."""
        with self._lock:
            self._generation += 1
            self._end(reason)

    def _require_joined(self) -> PlainGroup:
        if self.phase == "receiving":
            raise CannotDo("the trainer is already sending")
        if self.phase != "joined" or self._group is None:
            why = f": the group has ended: {self.error}" if self.error else ""
            raise CannotDo(f"it has not joined a trainer{why}")
        return self._group

    def _end(self, reason: str) -> None:
        self._group, self.phase, self.is_open = None, "none", False
        self._tensors = {}
        self.error = reason

    def _start_thread(self, phase: Phase, work: Callable[[], None]) -> None:
        self.phase, self.error = phase, ""
        threading.Thread(
            target=self._run, args=(work, self._generation), name="trainer", daemon=True
        ).start()

    def _run(self, work: Callable[[], None], generation: int) -> None:
        reason = ""
        try:
            work()
        except GroupBroken as error:
            reason = str(error)
        except Exception as error:
            logger.exception("cannot receive weights from the trainer")
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            if generation != self._generation:
                return
            if reason:
                self._end(reason)
            else:
                self.phase = "joined"

    def _join(self, spec: GroupSpec, generation: int) -> None:
        group = join_plain_group(spec, self._device)
        with self._lock:
            if generation == self._generation:
                self._group = group

    def _receive(self, group: PlainGroup, expected: Mapping[str, Tensor], generation: int) -> None:
        received = {}
        for name, like in expected.items():
            values = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            group.broadcast(values, lambda: generation == self._generation)
            received[name] = values.cpu()
        with self._lock:
            if generation == self._generation:
                self._tensors.update(received)
