"""The production classes of a simulated cluster; mutants replace one of them."""

from dataclasses import dataclass
from unittest import mock

from coordinator.state import CoordinatorState
from engine.core.engine_core import EngineCore
from engine.core.loop import EngineLoop
from engine.kv.tiers import KvTiers
from engine.kv.transfer_port import BlockPort
from engine.process.reception import FrontEndLinks, Reception
from engine.shared.membership import Membership
from server.router import router as router_module
from server.router.block_index import BlockIndex
from server.router.delivery import Delivery
from server.router.failover import Failover
from server.router.load import Loads
from server.router.members import Members
from server.router.routing import LeastLoaded, PrefixAware
from server.router.split import Split


@dataclass(frozen=True)
class Parts:
    """The decision-making classes of each kind of process."""

    coordinator: type[CoordinatorState] = CoordinatorState
    membership: type[Membership] = Membership
    core: type[EngineCore] = EngineCore
    links: type[FrontEndLinks] = FrontEndLinks
    reception: type[Reception] = Reception
    loop: type[EngineLoop] = EngineLoop
    members: type[Members] = Members
    loads: type[Loads] = Loads
    delivery: type[Delivery] = Delivery
    failover: type[Failover] = Failover
    index: type[BlockIndex] = BlockIndex
    tiers: type[KvTiers] = KvTiers
    port: type[BlockPort] = BlockPort

    def router(
        self, index: int, incarnation: int, max_resumes: int, *, prefix_caching: bool
    ) -> router_module.Router:
        """Build the router of a front-end process, which follows KV blocks."""
        blocks = self.index(index, 10_000) if prefix_caching else None
        with mock.patch.multiple(
            router_module,
            Members=self.members,
            Loads=self.loads,
            Delivery=self.delivery,
            Failover=self.failover,
        ):
            return router_module.Router(
                front_end=index,
                incarnation=incarnation,
                first_id=incarnation << 20,
                policy=PrefixAware(index) if prefix_caching else LeastLoaded(index),
                table=None,
                grace=TIMEOUT,
                max_resumes=max_resumes,
                resume_timeout=30.0,
                halted_timeout=1e9,
                index=blocks,
                split=Split(SPLIT_TOKENS, LeastLoaded(index)),
            )


SPLIT_TOKENS = 10
"""Minimum prompt tokens for a separate prefill, if there is a prefill engine."""
HEARTBEAT = 1.0
TIMEOUT = 3.0
"""Seconds of silence after which a member is considered dead."""
STEP_TIMEOUT = 1.0
"""Seconds after which a step is considered hung; five times that for an engine's first steps."""
DRAIN_TIMEOUT = 1000.0
"""Seconds after which a draining engine exits regardless: never within a run."""
