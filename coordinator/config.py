"""Settings of the coordinator; see `engine.shared.config.section` for the conventions."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.shared.config import ClusterConfig, HealthConfig, LogConfig, PositiveFloat, Section
from engine.shared.cpu.lists import CpuList

ExpectedEngines = Annotated[str, Meta(pattern=r"^([A-Za-z0-9._-]+=)?[0-9]{1,5}$")]


class PublishConfig(Section, frozen=True, kw_only=True):
    """Coordinator"""

    publish_interval: Annotated[
        PositiveFloat, "Minimum seconds between two messages of the coordinator with changed load."
    ] = 0.1
    publish_idle_interval: Annotated[
        PositiveFloat, "Seconds between the coordinator's messages while nothing changes."
    ] = 3.0
    expected_engines: Annotated[
        tuple[ExpectedEngines, ...],
        "Number of engines that should be there, or NAME=N for each engine group; missing ones "
        "show in metrics and on the status page; default: as many as the nodes' supervisors run.",
    ] = ()
    expected_engines_file: Annotated[
        str | None,
        "File with what --expected-engines says, separated by commas, read again when it changes.",
    ] = None

    def expected(self, group: str) -> int | None:
        """Return the expected number of engines of a group, None if not configured.

        Raises:
            OSError: the file cannot be read.
            ValueError: an entry of the file is malformed.
        """
        entries = self.expected_engines
        if self.expected_engines_file is not None:
            text = Path(self.expected_engines_file).read_text(encoding="utf-8")
            parts = [part.strip() for part in text.split(",") if part.strip()]
            entries = msgspec.convert(parts, tuple[ExpectedEngines, ...])
        numbers = dict(each.rpartition("=")[::2] for each in entries)
        return int(numbers[group]) if group in numbers else None


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    """All settings of the coordinator."""

    cluster: ClusterConfig = ClusterConfig()
    publish: PublishConfig = PublishConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()


class CoordinatorLaunch(msgspec.Struct, frozen=True):
    """Launch parameters that a supervisor sends to the coordinator it starts."""

    config: CoordinatorConfig
    has_predecessors: bool = True
    """Whether members of a previous coordinator may still be alive."""
    planned_engines: int | None = None
    """Engines in the coordinator's own group once all nodes have joined; None if unknown."""
    cpus: CpuList = ()
    """CPUs to bind the process to; empty: any."""
