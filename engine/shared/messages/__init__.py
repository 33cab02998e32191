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

# ruff: noqa: I001 - each module is imported once, and its names are names of this one too
from engine.shared.messages.adapters import (
    AdapterEntry as AdapterEntry,
    AdapterLoad as AdapterLoad,
    AdapterOutcome as AdapterOutcome,
    AdapterSheet as AdapterSheet,
    AdaptersInUse as AdaptersInUse,
    AdaptersView as AdaptersView,
    AdapterWish as AdapterWish,
    HeldAdapter as HeldAdapter,
)
from engine.shared.messages.coordination import (
    AbsenceReason as AbsenceReason,
    ClusterView as ClusterView,
    EngineEntry as EngineEntry,
    EngineReport as EngineReport,
    FollowFleet as FollowFleet,
    FormGroup as FormGroup,
    FrontEndNotice as FrontEndNotice,
    FrontEnds as FrontEnds,
    GroupOrder as GroupOrder,
    HoldAdapters as HoldAdapters,
    LoadChange as LoadChange,
    MissingEngine as MissingEngine,
    ProcessEntry as ProcessEntry,
    StartDpWave as StartDpWave,
    StartWave as StartWave,
    TenantsInUse as TenantsInUse,
    TenantUse as TenantUse,
    ViewChange as ViewChange,
    WakeUp as WakeUp,
    WaveComplete as WaveComplete,
)
from engine.shared.messages.fleet import (
    ASLEEP_TAGS as ASLEEP_TAGS,
    PUSHED as PUSHED,
    FleetOrder as FleetOrder,
    FleetWish as FleetWish,
    PauseMode as PauseMode,
    SleepMode as SleepMode,
    WeightsSource as WeightsSource,
)
from engine.shared.messages.membership import (
    CoordinatorReply as CoordinatorReply,
    Draining as Draining,
    EngineSetup as EngineSetup,
    FrontEndAddresses as FrontEndAddresses,
    FrontEndEntry as FrontEndEntry,
    Goodbye as Goodbye,
    GroupMember as GroupMember,
    GroupStatus as GroupStatus,
    Heartbeat as Heartbeat,
    HeartbeatAck as HeartbeatAck,
    Hello as Hello,
    KvRole as KvRole,
    MemberKind as MemberKind,
    MemberMessage as MemberMessage,
    ProcessUse as ProcessUse,
    Ready as Ready,
    Refused as Refused,
    Welcome as Welcome,
)
from engine.shared.messages.node import (
    ChildFailed as ChildFailed,
    ChildProgress as ChildProgress,
    ChildReady as ChildReady,
    ChildStatus as ChildStatus,
    ChildTurn as ChildTurn,
    ControlQuery as ControlQuery,
    ControlRequest as ControlRequest,
    ControlStatus as ControlStatus,
    RestartEngines as RestartEngines,
    ScaleEngines as ScaleEngines,
)
from engine.shared.messages.outputs import (
    STEP_TOKENS_BOUNDS as STEP_TOKENS_BOUNDS,
    EngineCounters as EngineCounters,
    EngineDead as EngineDead,
    EngineOutput as EngineOutput,
    EngineStats as EngineStats,
    ExpertLoad as ExpertLoad,
    FinishReason as FinishReason,
    KvBlocks as KvBlocks,
    Received as Received,
    RequestOutput as RequestOutput,
    RequestTiming as RequestTiming,
    StepOutputs as StepOutputs,
    TokenLogprob as TokenLogprob,
    UtilityResult as UtilityResult,
)
from engine.shared.messages.placement import (
    Assignment as Assignment,
    NodeEngines as NodeEngines,
    NodeOrder as NodeOrder,
    NodeReport as NodeReport,
    ScaleWish as ScaleWish,
)
from engine.shared.messages.requests import (
    ALL_BLOCKS as ALL_BLOCKS,
    MAX_ASPECT_RATIO as MAX_ASPECT_RATIO,
    ROOT_SIZE as ROOT_SIZE,
    AbortRequests as AbortRequests,
    AddRequest as AddRequest,
    ChoiceGrammar as ChoiceGrammar,
    CoreInput as CoreInput,
    EncoderInput as EncoderInput,
    EngineInput as EngineInput,
    GrammarSpec as GrammarSpec,
    JsonObjectGrammar as JsonObjectGrammar,
    JsonSchemaGrammar as JsonSchemaGrammar,
    KvBlocksWanted as KvBlocksWanted,
    KvSource as KvSource,
    LarkGrammar as LarkGrammar,
    PoolingParams as PoolingParams,
    RegexGrammar as RegexGrammar,
    RouteHello as RouteHello,
    RouteTaken as RouteTaken,
    SamplingParams as SamplingParams,
    UtilityCall as UtilityCall,
    UtilityValue as UtilityValue,
)
from engine.shared.messages.wire import (
    Message as Message,
    encode as encode,
)
