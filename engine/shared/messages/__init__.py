"""Every message that crosses a process boundary, one tagged union per direction.

All messages are `msgspec` Structs, tagged, `array_like` and encoded as msgpack, so a message is
a short array whose first element names its type. Decoding is typed: a malformed or foreign
message raises `msgspec.DecodeError`, which the receiver counts, logs once and drops.

Directions, by socket (binder first):

| socket         | type                              | down            | up                |
|----------------|-----------------------------------|-----------------|-------------------|
| registration   | ROUTER coordinator / DEALER all   | `CoordinatorReply` | `MemberMessage` |
| the same       | DEALER supervisors of several nodes | `NodeOrder`   | `NodeReport`      |
| front publish  | XPUB coordinator / XSUB front ends | `ClusterView`   | `FrontEndNotice`  |
| back output    | PULL coordinator / PUSH engines   |                 | `EngineReport`    |
| back publish   | XPUB coordinator / XSUB engines   | `GroupOrder`    |                   |
| requests       | ROUTER front end / DEALER engine  | `EngineInput`   | `RouteHello`  |
| outputs        | PULL front end / PUSH engine      |                 | `EngineOutput`    |
| control        | ROUTER supervisor / DEALER front ends | `ControlStatus` | `ControlRequest` |
"""

from engine.shared.messages.coordination import (
    ClusterView,
    EngineEntry,
    EngineReport,
    FormGroup,
    FrontEndNotice,
    FrontEnds,
    GroupOrder,
    StartDpWave,
    StartWave,
    WakeUp,
    WaveComplete,
)
from engine.shared.messages.membership import (
    CoordinatorReply,
    Draining,
    EngineSetup,
    FrontEndAddresses,
    FrontEndEntry,
    Goodbye,
    GroupMember,
    GroupStatus,
    Heartbeat,
    HeartbeatAck,
    Hello,
    MemberKind,
    MemberMessage,
    Ready,
    Refused,
    Welcome,
)
from engine.shared.messages.node import (
    ChildFailed,
    ChildProgress,
    ChildReady,
    ChildStatus,
    ControlQuery,
    ControlRequest,
    ControlStatus,
    RestartEngines,
    ScaleEngines,
)
from engine.shared.messages.outputs import (
    STEP_TOKENS_BOUNDS,
    EngineCounters,
    EngineDead,
    EngineOutput,
    EngineStats,
    FinishReason,
    Received,
    RequestOutput,
    RequestTiming,
    StepOutputs,
    TokenLogprob,
    UtilityResult,
)
from engine.shared.messages.placement import (
    Assignment,
    NodeEngines,
    NodeOrder,
    NodeReport,
    ScaleWish,
)
from engine.shared.messages.requests import (
    ROOT_SIZE,
    AbortRequests,
    AddRequest,
    ChoiceGrammar,
    CoreInput,
    EngineInput,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
    RouteHello,
    RouteTaken,
    SamplingParams,
    UtilityCall,
    UtilityValue,
)
from engine.shared.messages.wire import (
    Message,
    encode,
)

__all__ = [
    "ROOT_SIZE",
    "STEP_TOKENS_BOUNDS",
    "AbortRequests",
    "AddRequest",
    "Assignment",
    "ChildFailed",
    "ChildProgress",
    "ChildReady",
    "ChildStatus",
    "ChoiceGrammar",
    "ClusterView",
    "ControlQuery",
    "ControlRequest",
    "ControlStatus",
    "CoordinatorReply",
    "CoreInput",
    "Draining",
    "EngineCounters",
    "EngineDead",
    "EngineEntry",
    "EngineInput",
    "EngineOutput",
    "EngineReport",
    "EngineSetup",
    "EngineStats",
    "FinishReason",
    "FormGroup",
    "FrontEndAddresses",
    "FrontEndEntry",
    "FrontEndNotice",
    "FrontEnds",
    "Goodbye",
    "GrammarSpec",
    "GroupMember",
    "GroupOrder",
    "GroupStatus",
    "Heartbeat",
    "HeartbeatAck",
    "Hello",
    "JsonObjectGrammar",
    "JsonSchemaGrammar",
    "LarkGrammar",
    "MemberKind",
    "MemberMessage",
    "Message",
    "NodeEngines",
    "NodeOrder",
    "NodeReport",
    "Ready",
    "Received",
    "Refused",
    "RegexGrammar",
    "RequestOutput",
    "RequestTiming",
    "RestartEngines",
    "RouteHello",
    "RouteTaken",
    "SamplingParams",
    "ScaleEngines",
    "ScaleWish",
    "StartDpWave",
    "StartWave",
    "StepOutputs",
    "TokenLogprob",
    "UtilityCall",
    "UtilityResult",
    "UtilityValue",
    "WakeUp",
    "WaveComplete",
    "Welcome",
    "encode",
]
