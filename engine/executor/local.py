"""What executors have in common that compute in the engine's own process."""

from pathlib import Path

import torch

from engine.executor.interface import CannotDo, ExecutorInfo
from engine.executor.step_thread import StepThread
from engine.runner.host_memory import give_back_freed_memory


class LocalExecutor:
    """Where the steps of this process run, and what is the same whatever they compute."""

    def __init__(self, info: ExecutorInfo, steps: StepThread, device: torch.device) -> None:
        self._info = info
        self._steps = steps
        self._device = device

    @property
    def info(self) -> ExecutorInfo:
        """What was found while loading."""
        return self._info

    def start_profile(self) -> None:
        """Begin to record what steps do.

        Raises:
            CannotDo: a profile is being recorded.
        """
        self._steps.start_profile()

    def stop_profile(self, path: Path) -> None:
        """End the recording and write its trace.

        Raises:
            CannotDo: nothing is being recorded.
            OSError: the trace cannot be written.
        """
        self._steps.stop_profile(path)

    def _give_back_memory(self) -> None:
        """Let the system have what no longer holds weights or keys and values."""
        give_back_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_unchanged(self, fingerprint: str) -> None:
        """Compare a model that was loaded again with the one that was loaded first.

        Raises:
            CannotDo: they differ.
        """
        if fingerprint != self._info.model_fingerprint:
            raise CannotDo("the model's weights have changed: the engine has to be restarted")
