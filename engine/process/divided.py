"""Starts an executor whose model is divided over processes, of this node alone or of several."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.batch.executor import Executor
from engine.executor.team import Team
from engine.process.early_stop import EarlyStop
from engine.shared.config import EngineConfig
from engine.shared.lifeline import Lifeline

if TYPE_CHECKING:
    from engine.executor.nodes.leading import NodeLinks


def divided_executor(
    config: EngineConfig,
    rank: int,
    engines_on_node: int,
    lifeline: Lifeline,
    early_stop: EarlyStop,
    on_failure: Callable[[str], None] | None,
) -> Executor:
    """Wait for the other nodes, if there are any; start all workers and load the model.

    `on_failure` is called, in another thread, when one of them dies. None of them is left, whenever
    the engine is asked to stop.

    Raises:
        OSError: a process cannot be started, or not all nodes have joined.
        WorkerFailed: a worker cannot start.
        ValueError: the model cannot be served with these settings.
    """
    team: Team | None = None
    nodes: NodeLinks | None = None
    try:
        if config.parallel.nnodes > 1:
            with early_stop.held():
                nodes = _node_links(config)
            nodes.wait(lifeline.progress)
        with early_stop.held():
            team = Team(config, rank, engines_on_node, nodes)
        from engine.executor.multi_process import MultiProcessExecutor  # imports torch

        executor = MultiProcessExecutor(
            config, team, rank, engines_on_node, lifeline.progress, on_failure
        )
        if nodes is not None:
            nodes.started()
        return executor
    except BaseException:
        with early_stop.held():
            if team is not None:
                team.close()
            if nodes is not None:
                nodes.close()
        raise


def _node_links(config: EngineConfig) -> "NodeLinks":
    from engine.executor.nodes import leading  # few engines span nodes

    return leading.NodeLinks(config)
