"""Registration messages between the coordinator and its members."""

from typing import Literal

import msgspec

from engine.shared.messages.adapters import AdapterLoadResult, AdapterTable
from engine.shared.messages.fleet import FleetOrder
from engine.shared.messages.wire import Message
from engine.shared.scope import EVERYTHING, Scope

MemberKind = Literal["engine", "front_end"]

KvRole = Literal["", "prefill", "decode", "both"]
"""Whether an engine computes prompts for other engines, reads their KV blocks, or both."""


class EngineSetup(msgspec.Struct, frozen=True, array_like=True):
    """Properties of an engine that are known once it is set up."""

    num_kv_blocks: int
    block_size: int
    max_model_len: int
    model_fingerprint: str
    """Equal on all engines with the same weights."""
    max_num_seqs: int = 0
    """Maximum concurrent sequences; 0 if not reported."""
    enable_prefix_caching: bool | None = None
    """This and the next three: KV cache settings, None if not reported."""
    gpu_memory_utilization: float | None = None
    num_kv_blocks_set: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_cache_groups: int = 1
    """Groups of layers, each with separate KV blocks for a sequence's tokens."""
    kv_cache_dtype: str = "auto"
    """Configured storage type of keys and values."""
    is_batch_invariant: bool = False
    """Whether tokens are independent of the rest of the batch."""
    utilities: tuple[str, ...] | None = None
    """Utilities that operators can call (`engine.core.utilities`); None: all."""
    images: bool = False
    """Whether prompts can contain images (`AddRequest.encoder_inputs`)."""
    reports_blocks: bool = False
    """Whether it answers `KvBlocksQuery`."""
    image_window: int = 0
    """Bytes of images kept per front end (`engine.shared.image_window`)."""
    kv_role: KvRole = ""
    kv_address: str = ""
    """Address from which others read offered KV blocks (`KvSource`); empty if it offers none."""
    whole_images: bool = False
    """Whether images cross at their own size (`EncoderInput`); the engine resizes them."""

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens, if no layer has a sliding window."""
        return self.num_kv_blocks // self.num_cache_groups * self.block_size


class FrontEndAddresses(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of a front end for engines."""

    requests: str
    outputs: str


class GroupMember(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One engine process of a lockstep group."""

    rank: int
    incarnation: int


class GroupStatus(msgspec.Struct, frozen=True, array_like=True):
    """An engine's reported state in its lockstep group.

    See `engine.lockstep.group_membership`.
    """

    state: Literal["apart", "preparing", "prepared", "joined"]
    topology: int
    """Newest formation known: the one it left, prepares for or is in."""
    address: str
    """HOST:PORT of the rendezvous if this engine leads the group."""
    members: list[GroupMember] = []
    """The members of its group, itself included; empty unless joined."""


class Hello(Message, frozen=True):
    """A process requests to join (again after the coordinator restarted).

    `host` is the name of its node. `incarnation` is a random number drawn once per process. `index`
    is the rank or front-end number, or -1 to have one assigned. `group_config` holds the settings
    that must be equal on all engines, as text, so that a refusal can name the one that differs;
    front ends send only the model's (`engine.shared.group_config`). The key "lockstep" with the
    value "true" marks engines that step together and need waves; "data_parallel_size" is then the
    size of the first group and "regroup" the policy when an engine dies.

    Fields are only ever appended, so that processes of all versions can parse each other's
    messages.
    """

    kind: MemberKind
    index: int
    incarnation: int
    host: str
    pid: int
    group_config: dict[str, str] = {}
    addresses: FrontEndAddresses | None = None
    wave: int = 0
    """Last wave of a rejoining engine; the coordinator takes the maximum it sees."""
    scope: Scope = EVERYTHING
    """The engines to which a front end routes."""
    protocol: int = 0
    """See `engine.shared.version`; 0 in processes that predate the field."""
    version: str = ""
    """Version of Swell, for display."""
    group: str = ""
    """The process's engine group (`--engine-group`)."""
    given: bool = False
    """Whether `index` was assigned by a coordinator earlier in the process's life."""
    adapters: AdapterTable | None = None
    """Newest adapter table known, for a coordinator without one."""
    fleet: FleetOrder | None = None
    """Newest fleet order known, likewise."""
    takes_changes: bool = False
    """Whether a front end supports `ViewChange`."""


class ProcessUse(msgspec.Struct, frozen=True, array_like=True):
    """Resource usage of a process; see `engine.shared.process_state`."""

    cpu_seconds: float
    """Processor time over all CPUs since the start."""
    resident_bytes: int
    open_fds: int
    max_fds: int
    started: float
    """Unix time."""


class Ready(Message, frozen=True):
    """The member is set up and takes part; then repeated as its heartbeat."""

    kind: MemberKind
    index: int
    incarnation: int
    setup: EngineSetup | None = None
    group_status: GroupStatus | None = None
    adapters: list[AdapterLoadResult] = []
    """Load outcomes of the known table's adapters, from engines."""
    use: ProcessUse | None = None


class Heartbeat(Message, frozen=True):
    """The member is alive but not yet set up; answered by `HeartbeatAck`."""

    kind: MemberKind
    index: int
    incarnation: int
    group_status: GroupStatus | None = None
    adapters: list[AdapterLoadResult] = []
    use: ProcessUse | None = None


class Goodbye(Message, frozen=True):
    """The member leaves deliberately, or its supervisor saw it die.

    An `index` of -1 stands for the number assigned to this incarnation.
    """

    kind: MemberKind
    index: int
    incarnation: int


class Draining(Message, frozen=True):
    """The member finishes its work and accepts no more; its heartbeat until the goodbye."""

    kind: MemberKind
    index: int
    incarnation: int
    group_status: GroupStatus | None = None
    adapters: list[AdapterLoadResult] = []
    use: ProcessUse | None = None


MemberMessage = Hello | Ready | Heartbeat | Draining | Goodbye


class FrontEndEntry(msgspec.Struct, frozen=True, array_like=True):
    """A front end's entry in messages to engines."""

    index: int
    incarnation: int
    addresses: FrontEndAddresses
    scope: Scope = EVERYTHING
    protocol: int = 0
    """Its protocol; 0 from coordinators that predate the field."""


class Welcome(Message, frozen=True):
    """The coordinator accepts a member and sends it the current state and addresses."""

    epoch: int
    """Random number of this coordinator process: a change means that it restarted."""
    index: int
    wave: int
    publish_address: str
    """Front publish for front ends, back publish for engines."""
    output_address: str
    """Back output for engines; empty for front ends."""
    front_ends: list[FrontEndEntry] = []
    protocol: int = 0
    """See `engine.shared.version`; 0 from coordinators that predate the field."""
    version: str = ""
    """Version of Swell, for display."""
    adapters: AdapterTable | None = None
    """Adapters that an engine has to load before it accepts requests."""
    fleet: FleetOrder | None = None
    """The operators' current order."""


class Refused(Message, frozen=True):
    """The member cannot join; `field` names the setting that differs, if that is the reason.

    After a refusal that is not final (e.g. the rank's last holder is not known to be dead yet) the
    member retries. A final one with the field "index" means that the member timed out and its
    number was reassigned: its process has to exit.
    """

    reason: str
    field: str | None = None
    final: bool = True


class HeartbeatAck(Message, frozen=True):
    """Answer to a heartbeat; `known` is False if the member has to send HELLO again."""

    epoch: int
    known: bool


CoordinatorReply = Welcome | Refused | HeartbeatAck
