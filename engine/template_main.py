"""`python -m engine.template_main`: the template of a node's engines (`engine.shared.template`)."""

import importlib

from engine.executor.environment import compute_processes, configure_environment
from engine.shared.template import TemplateLaunch, run

LOADED = ("engine.process.main", "engine.executor.in_process", "numba")
"""With torch, but nothing that computes: no thread may be there yet."""


def load(launch: TemplateLaunch) -> None:
    """Import what engines import, in the environment in which they would."""
    config = launch.engine
    assert config is not None
    engines = max(1, config.parallel.engines_on_node)
    configure_environment(compute_processes(config, engines))
    for name in LOADED:
        importlib.import_module(name)


if __name__ == "__main__":
    run("engine", load)
