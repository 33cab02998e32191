"""Every message that crosses a process boundary, one tagged union per direction.

All messages are `msgspec` Structs, tagged, `array_like` and encoded as msgpack, so a message is
a short array whose first element names its type. Decoding is typed: a malformed or foreign
message raises `msgspec.DecodeError`, which the receiver counts, logs once and drops.

Directions, by socket (binder first):

| socket         | type                              | down            | up                |
|----------------|-----------------------------------|-----------------|-------------------|
| registration   | ROUTER coordinator / DEALER all   | `CoordinatorReply` | `MemberMessage` |
| the same       | DEALER supervisors of several nodes | `NodeOrder`   | `NodeReport`      |
| front publish  | XPUB coordinator / XSUB them | `ClusterView`, `ViewChange` | `FrontEndNotice` |
| back output    | PULL coordinator / PUSH engines   |                 | `EngineReport`    |
| back publish   | XPUB coordinator / XSUB engines   | `GroupOrder`    |                   |
| requests       | ROUTER front end / DEALER engine  | `EngineInput`   | `RouteHello`  |
| outputs        | PULL front end / PUSH engine      |                 | `EngineOutput`    |
| control        | ROUTER supervisor / DEALER front ends | `ControlStatus` | `ControlRequest` |
"""

# ruff: noqa: F403 - the names of these modules are names of this one too
from engine.shared.messages.adapters import *
from engine.shared.messages.coordination import *
from engine.shared.messages.fleet import *
from engine.shared.messages.membership import *
from engine.shared.messages.node import *
from engine.shared.messages.outputs import *
from engine.shared.messages.requests import *
from engine.shared.messages.wire import *
