"""Chooses a supervisor's backend; the one that needs Ray is imported only if it is chosen."""

from pathlib import Path

from server.config import ServeConfig
from server.fleet.backend import Backend, CannotServe, ProcessBackend
from server.fleet.joining import check_span


def backend_for(config: ServeConfig, directory: Path) -> Backend:
    """Return the backend that the settings name.

    Args:
        directory: the node's private one.

    Raises:
        CannotServe: it cannot serve here, for a reason that is its own.
        BadNode: a setting contradicts another, or lacks one.
        OSError: a name cannot be resolved.
    """
    check_span(config)
    if config.ray.data_parallel_backend == "mp":
        if config.ray.api_server_placement != "head":
            raise CannotServe(
                "--api-server-placement every-node is for --data-parallel-backend ray: on plain "
                "nodes run `swell api-server`, or `swell serve` without --headless"
            )
        return ProcessBackend(config, directory)
    try:
        from server.fleet.ray.backend import RayBackend  # Ray is only there for who wants it
    except ModuleNotFoundError as error:
        raise CannotServe(
            f"--data-parallel-backend ray needs Ray ({error}): install it on every node with "
            "pip install 'swell[ray]'"
        ) from error
    return RayBackend(config, directory)
