"""Traces of what a step spends its time on, for chrome://tracing and Perfetto."""

import contextlib
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Records between `start` and `stop`; both belong in the thread that runs the steps.

    Everything is kept in memory until `stop`: record seconds, not hours.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)

    def start(self) -> None:
        """Begin to record."""
        self._profile.start()

    def stop(self, path: Path) -> None:
        """Write what was recorded, gzipped if the name ends so; missing directories are made.

        Raises:
            OSError: the file cannot be written; nothing of it is left.
        """
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._profile.export_chrome_trace(str(path))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
