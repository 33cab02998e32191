"""Binds the processes of an engine to the CPUs that were chosen for them. No torch."""

from engine.executor.layout import Layout
from engine.shared.config import EngineConfig
from engine.shared.cpu.machine import bind_process


def sharers(config: EngineConfig, engines_on_node: int) -> int:
    """Return how many processes compute on the CPUs that this one may use."""
    if config.executor.bound_to:
        return 1
    return engines_on_node * config.parallel.processes_on_node


def bound(config: EngineConfig, rank: int = 0) -> EngineConfig:
    """Bind this process as its engine's settings say; return the settings that hold from now on.

    Before torch is imported: its threads get what the thread has that starts them.

    Args:
        rank: this process's among the engine's; the leader's is 0.
    """
    lists = config.executor.bound_to
    number = Layout.of(config.parallel).number(rank)
    if number < len(lists) and bind_process(lists[number]):
        return config
    return config.changed(executor={"cpu_bind": "none"})
