"""Events handled by a front end's router, and the actions that it returns.

Structs instead of dataclasses: several are created per request, and one per step of an engine.
"""

import msgspec

from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    ClusterView,
    EngineDead,
    KvBlocks,
    KvBlocksQuery,
    RequestOutput,
    RouteHello,
    RouteTaken,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.request import RoutedRequest

# -- events --------------------------------------------------------------------------------------


class EngineHello(msgspec.Struct, frozen=True):
    """An engine's hello on the request socket; `sender` is its socket identity."""

    sender: bytes
    hello: RouteHello


class SendsFailed(msgspec.Struct, frozen=True):
    """Some of the `Send` actions returned last had no peer."""

    sends: "list[Send]"


class Tick(msgspec.Struct, frozen=True):
    """Periodic timer event."""


Event = (
    StepOutputs | EngineHello | ClusterView | Tick | EngineDead | SendsFailed | UtilityResult
    | KvBlocks
)  # fmt: skip


# -- actions -------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send to an engine; a failure must be reported as `SendsFailed`."""

    to: bytes
    rank: int
    incarnation: int
    message: AddRequest | UtilityCall
    reason: str = ""
    """Why this engine was chosen, for the routing metric."""


class SendIfReachable(msgspec.Struct, frozen=True):
    """Send to an engine, ignoring failures."""

    to: bytes
    message: AbortRequests | RouteTaken | KvBlocksQuery


class Deliver(msgspec.Struct, frozen=True):
    """Pass the outputs of one step to the readers of their requests."""

    outputs: list[tuple[RoutedRequest, RequestOutput]]


class Fail(msgspec.Struct, frozen=True):
    """End a request with an error, since it cannot continue."""

    request: RoutedRequest
    error: NoEngineAvailable | KillsEngines


class CallResult(msgspec.Struct, frozen=True):
    """A call is complete: results by rank, with errors for missing answers."""

    call_id: int
    results: list[UtilityResult]


class Notify(msgspec.Struct, frozen=True):
    """Send a notice to the coordinator."""

    notice: WakeUp


class Count(msgspec.Struct, frozen=True):
    """Increment a counter of the metrics."""

    name: str
    by: int = 1


class Woken(msgspec.Struct, frozen=True):
    """Metric: time from a request's send until paused engines ran."""

    seconds: float


Action = Deliver | Send | SendIfReachable | Fail | CallResult | Notify | Count | Woken
