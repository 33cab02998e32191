"""Where the engines of a supervisor run: processes of its node, or actors of a Ray cluster."""

import logging
from pathlib import Path

from engine.shared.cpu.lists import CpuList
from engine.shared.cpu.plan import BadCpuBind
from server.config import ServeConfig
from server.fleet.joining import joining
from server.fleet.keeper import Role
from server.fleet.node_resources import plan_cpus
from server.fleet.places import engine_role

logger = logging.getLogger(__name__)


class CannotServe(Exception):
    """Engines cannot be run as the settings ask; the message is for people."""


class ProcessBackend:
    """Makes the places of engines as processes of this node.

    What happens in them is the supervisor's policy. `server.fleet.ray.backend` has the other kind.
    """

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        """Make it; raises what `joining` does.

        Raises:
            CannotServe: the lists of `--cpu-bind` do not fit the machine or the engines.
        """
        self.joined = joining(config, f"ipc://{directory}/coordinator")
        """The node's place in its cluster, with the settings that follow from it."""
        self.has_all = self.joined.is_alone
        """Whether the engines of all nodes are here, so that no other supervisor has a share."""
        config = self.joined.config
        others = config.supervisor.api_server_count + (1 if self.joined.leads else 0)
        try:
            self._cpus = plan_cpus(config.engine(), others=others)
        except BadCpuBind as error:
            raise CannotServe(str(error)) from error
        self.cpus_of_others: CpuList = self._cpus.others
        """CPUs of this node's front ends and coordinator; empty: any."""
        if not self._cpus.engines:
            logger.debug("engines run on any CPU: %s", self._cpus.reason)

    def engine_role(self, config: ServeConfig, place: int, *, numbered: bool) -> Role:
        """Return the place of one engine of this node."""
        config = config.changed(executor={"cpu_bind": self._cpus.of_engine(place)})
        return engine_role(config, place, numbered=numbered)

    def api_server_role(self, config: ServeConfig, node: str, port: int) -> Role | None:
        """Return None: all engines are on the supervisor's node."""
        return None

    def close(self) -> None:
        """Do nothing: nothing was reserved."""
