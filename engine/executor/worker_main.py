"""Entry point of a worker: configures the environment before libraries are imported."""

import msgspec

from engine.executor.environment import bind_cpus, configure_environment
from engine.executor.team_messages import WorkerLaunch
from engine.shared.lifeline import Lifeline


def begin() -> tuple[WorkerLaunch, Lifeline]:
    """Wait for the launch parameters; bind this process and configure its environment."""
    lifeline = Lifeline.from_environment()
    launch = lifeline.read_launch(WorkerLaunch)
    launch = msgspec.structs.replace(launch, config=bind_cpus(launch.config, launch.rank))
    configure_environment()
    return launch, lifeline


def main() -> int:
    """Run a worker for the engine that started this process; return the exit code."""
    launch, lifeline = begin()
    from engine.executor.worker import run  # imports torch

    return run(launch, lifeline)


if __name__ == "__main__":
    raise SystemExit(main())
