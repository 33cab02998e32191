"""What happens to a front end's router, and what it does about it.

Structs and not dataclasses: several are made for every request, one for every step of an engine.
"""

import msgspec

from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    ClusterView,
    EngineDead,
    KvBlocks,
    KvBlocksWanted,
    RequestOutput,
    RouteHello,
    RouteTaken,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    UtilityValue,
    WakeUp,
)
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.request import RoutedRequest

# -- events --------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True):
    """A new request; its id is given to it here."""

    request: RoutedRequest


class Close(msgspec.Struct, frozen=True):
    """The outputs of a request are no longer read, whether it has ended or not."""

    request: RoutedRequest


class EngineHello(msgspec.Struct, frozen=True):
    """An engine's hello on the request socket; `sender` is how to reach it."""

    sender: bytes
    hello: RouteHello


class SendsFailed(msgspec.Struct, frozen=True):
    """There was no peer for some of the `Send`s that were returned last."""

    sends: "list[Send]"


class Call(msgspec.Struct, frozen=True):
    """Call a utility of one engine, or of all with rank None."""

    call_id: int
    rank: int | None
    name: str
    arguments: dict[str, UtilityValue]


class CallOverdue(msgspec.Struct, frozen=True):
    """The caller waits no longer for the answers that are still missing."""

    call_id: int
    why: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class FollowBlocks(msgspec.Struct, frozen=True):
    """It is time to ask engines which KV blocks they hold."""


Event = (
    StepOutputs | Submit | Close | EngineHello | ClusterView | Tick | EngineDead
    | SendsFailed | Call | UtilityResult | CallOverdue | KvBlocks | FollowBlocks
)  # fmt: skip


# -- actions -------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send to an engine; a failure must be reported with `SendsFailed`."""

    to: bytes
    rank: int
    incarnation: int
    message: AddRequest | UtilityCall
    reason: str = ""
    """Why the request goes to this engine, for the routing metric."""


class Tell(msgspec.Struct, frozen=True):
    """Tell an engine something, if it is there."""

    to: bytes
    message: AbortRequests | RouteTaken | KvBlocksWanted


class Deliver(msgspec.Struct, frozen=True):
    """Hand the outputs of one step to the readers of their requests."""

    outputs: list[tuple[RoutedRequest, RequestOutput]]


class Fail(msgspec.Struct, frozen=True):
    """A request ends with an error: nothing can go on with it."""

    request: RoutedRequest
    error: NoEngineAvailable | KillsEngines


class Refuse(msgspec.Struct, frozen=True):
    """A submitted request, or a call, is not taken; the only action then."""

    error: NoEngineAvailable


class CallResult(msgspec.Struct, frozen=True):
    """A call is over: these are the answers, by rank, including errors for missing ones."""

    call_id: int
    results: list[UtilityResult]


class Notify(msgspec.Struct, frozen=True):
    """Tell the coordinator."""

    notice: WakeUp


class Count(msgspec.Struct, frozen=True):
    """Add to a counter of the metrics."""

    name: str
    by: int = 1


class Woken(msgspec.Struct, frozen=True):
    """For the metrics: how long paused engines took to run after a request was sent to one."""

    seconds: float


Action = Deliver | Send | Tell | Fail | Refuse | CallResult | Notify | Count | Woken
