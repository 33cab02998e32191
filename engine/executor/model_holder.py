"""Loads, offloads, replaces and frees the part of a model that one process holds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.distributed.group import Group
from engine.executor.loading import LoadedModel
from engine.executor.offloading import OffloadedWeights, offload
from engine.models.formats.files import TensorFiles
from engine.models.loading.mlps import GroupPosition
from engine.models.parallel.balance import ExpertBalance
from engine.runner.host_memory import release_freed_memory

Load = Callable[[GroupPosition | None, ExpertBalance | None, TensorFiles | None], LoadedModel]
"""Loads the model with the experts of a position, or all, and keeps the measured expert load.
Weights come from the checkpoint, or from tensors that a trainer has sent."""


@dataclass(eq=False)
class ModelHolder:
    """The part of a model that this process computes."""

    load: Load
    device: torch.device
    in_group: GroupPosition | None
    """Position among the engines that share the experts; None to hold all experts."""
    report: Callable[[str], None]
    """Receives human-readable progress messages."""

    def __post_init__(self) -> None:
        self.balance: ExpertBalance | None = None
        """Measured load of the experts, if enabled."""
        self._experts: Group | None = None
        """All processes that hold experts, once known."""
        self._offloaded: OffloadedWeights | None = None
        """Offloaded weights, while they are not on the device."""
        self._previous: LoadedModel | None = None
        """The previous model after the weights were replaced, until `settle`."""
        self.loaded: LoadedModel | None = self._load_new()
        """None while the weights are freed."""

    def share_experts(self, group: Group | None) -> None:
        """Set the processes that exchange expert tokens, if the model's experts are spread."""
        self._experts = group
        self.join_experts()

    def join_experts(self) -> None:
        """Rejoin the expert group, after a trial or a reload of the model."""
        experts = None if self.loaded is None else self.loaded.model.expert_group
        if experts is not None and self._experts is not None:
            experts.join(self._experts)

    @torch.inference_mode()
    def move(self, in_group: GroupPosition, shards: int) -> None:
        """Hold the experts of another position, with `shards` processes per engine."""
        before, self.in_group = self.in_group, in_group
        if self.balance is not None:
            self.balance.reset(in_group.size * shards)
        if in_group == before and self.balance is None:
            return
        if self._offloaded is not None:  # they belong to the previous position
            self.free()
        if self.loaded is None or self.loaded.loader is None:
            return
        self.report(f"loading the experts of engine {in_group.position + 1} of {in_group.size}")
        self.loaded.loader.redistribute_experts(self.loaded.model, in_group)
        release_freed_memory(self.device)

    def free(self) -> None:
        """Free the weights."""
        self.loaded = self._offloaded = None

    def sleep(self, level: int) -> None:
        """Free the weights at level 2; at level 1 offload those of an accelerator to host memory,
        or free them if it has no room."""
        loaded = self.loaded
        if level > 1:
            self.free()
        elif self.device.type != "cpu" and loaded is not None and self._offloaded is None:
            models = [loaded.model, loaded.draft, loaded.vision]
            self._offloaded = offload(models, self.device)
            if self._offloaded is None:
                self.free()
        release_freed_memory(self.device)

    def wake_up(self) -> LoadedModel:
        """Restore the weights to the device, reloading them if they were freed."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if self.loaded is None:
            self.loaded = self._load_new()
            self.join_experts()
        return self.loaded

    def replace(self, sent: TensorFiles | None) -> LoadedModel:
        """Load other weights; the previous ones are kept until `settle`, so both need memory."""
        self._previous = None
        before, self.loaded = self.loaded, self._load_new(sent)
        self._previous = before
        self.join_experts()
        return self.loaded

    def settle(self, *, revert: bool) -> None:
        """Free the previous weights, or with `revert` switch back to them."""
        replaced, self._previous = self._previous, None
        if revert and replaced is not None:
            self.loaded = replaced
        release_freed_memory(self.device)

    def close(self) -> None:
        """Free everything."""
        self._previous = None
        self.free()

    def _load_new(self, sent: TensorFiles | None = None) -> LoadedModel:
        loaded = self.load(self.in_group, self.balance, sent)
        if loaded.model.expert_group is not None:
            self.balance = loaded.model.expert_group.balance
        return loaded
