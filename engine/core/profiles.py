"""Records of what an engine's steps do, for profilers."""

from pathlib import Path

from engine.batch.executor import CannotDo, Executor
from engine.shared.writable import writable_directory


class Profiles:
    """Begins and ends recordings in the directory that operators have named."""

    def __init__(self, directory: str | None, executor: Executor, *, engine: str) -> None:
        self._directory = directory
        self._executor = executor
        self._engine = engine

    def start(self) -> str:
        """Begin to record what steps do; return the directory where the trace will be.

        Raises:
            CannotDo: there is no such directory, or nothing to record.
        """
        if self._directory is None:
            raise CannotDo("profiles need a place: start the engines with --torch-profiler-dir")
        writable_directory(self._directory)
        self._executor.start_profile()
        return self._directory

    def stop(self, step: int) -> str:
        """End the recording before this step and return the path of its trace.

        Raises:
            CannotDo: nothing is being recorded.
        """
        path = Path(self._directory or "") / f"engine-{self._engine}-step-{step}.json.gz"
        self._executor.stop_profile(path)
        return str(path)
