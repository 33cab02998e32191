"""Registration: between the coordinator and everybody."""

from typing import Literal

import msgspec

from engine.shared.messages.adapters import AdapterSheet, HeldAdapter
from engine.shared.messages.fleet import FleetOrder
from engine.shared.messages.wire import Message
from engine.shared.scope import EVERYTHING, Scope

MemberKind = Literal["engine", "front_end"]

KvRole = Literal["", "prefill", "decode", "both"]
"""Whether an engine computes prompts for others, or reads what these have computed, or both."""


class EngineSetup(msgspec.Struct, frozen=True, array_like=True):
    """What an engine found out while it set itself up."""

    num_kv_blocks: int
    block_size: int
    max_model_len: int
    model_fingerprint: str
    """Equal on all engines that hold the same weights."""
    max_num_seqs: int = 0
    """Maximum sequences that the engine runs at once; 0 if it does not say."""
    enable_prefix_caching: bool | None = None
    """This and the following are its KV cache settings, as far as it reports them."""
    gpu_memory_utilization: float | None = None
    num_kv_blocks_set: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_cache_groups: int = 1
    """Groups of layers, each of which has KV blocks of its own for a sequence's tokens."""
    kv_cache_dtype: str = "auto"
    """How it keeps keys and values, as it was set."""
    is_batch_invariant: bool = False
    """Whether no token depends on what shares its step."""
    utilities: tuple[str, ...] | None = None
    """What operators can call by name (`engine.core.utilities`); None: all that there are."""
    images: bool = False
    """Whether prompts may show images (`AddRequest.encoder_inputs`)."""
    tells_blocks: bool = False
    """Whether it answers `KvBlocksWanted`."""
    image_window: int = 0
    """Bytes of images that it keeps for each front end (`engine.shared.image_window`)."""
    kv_role: KvRole = ""
    kv_address: str = ""
    """Where others read KV blocks that it offers (`KvSource`); empty if it offers none."""
    whole_images: bool = False
    """Whether images cross as they are (`EncoderInput`), and it resizes them itself."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache keeps, if none of them slide out of a window."""
        return self.num_kv_blocks // self.num_cache_groups * self.block_size


class FrontEndAddresses(msgspec.Struct, frozen=True, array_like=True):
    """Where engines reach one front end."""

    requests: str
    outputs: str


class GroupMember(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One engine process of a lockstep group."""

    rank: int
    incarnation: int


class GroupStatus(msgspec.Struct, frozen=True, array_like=True):
    """An engine's state in its lockstep group, by its own account.

    See `engine.lockstep.group_membership`.
    """

    state: Literal["apart", "preparing", "prepared", "joined"]
    topology: int
    """Newest formation that it heard of: the one it left, prepares for or is in."""
    address: str
    """HOST:PORT where it would host the meeting point of a group that it leads."""
    members: list[GroupMember] = []
    """The members of its group, itself included; empty unless joined."""


class Hello(Message, frozen=True):
    """A process asks to join (or joins again after the coordinator restarted).

    `host` is the name of its node.
    `incarnation` is a random number drawn once per process. `index` is the rank or front-end
    number, or -1 to be given one. `group_config` holds the settings that must be equal on all
    engines, as text, so that a refusal can name the one that differs; front ends state the model's
    only (`engine.shared.group_config`). The key "lockstep" with the
    value "true" says that the engines step together and need waves; "data_parallel_size" then says
    how many form the first group and "regroup" what happens when one of them dies.

    Fields are only ever appended, so that processes of all versions understand each other so far.
    """

    kind: MemberKind
    index: int
    incarnation: int
    host: str
    pid: int
    group_config: dict[str, str] = {}
    addresses: FrontEndAddresses | None = None
    wave: int = 0
    """The wave an engine that joins again was in; a coordinator takes the maximum it sees."""
    scope: Scope = EVERYTHING
    """The engines that a front end routes to."""
    protocol: int = 0
    """See `engine.shared.version`; 0 in processes that are older than the field."""
    version: str = ""
    """Version of Swell, for people."""
    group: str = ""
    """The engine group that the process belongs to (`--engine-group`)."""
    given: bool = False
    """Whether a coordinator gave the member its `index`, earlier in its life."""
    adapters: AdapterSheet | None = None
    """The newest sheet of adapters that the process knows, for a coordinator that knows none."""
    fleet: FleetOrder | None = None
    """The same of what operators want of all engines."""
    takes_changes: bool = False
    """Whether a front end understands `ViewChange`."""


class ProcessUse(msgspec.Struct, frozen=True, array_like=True):
    """What a process takes of its machine; see `engine.shared.own_process`."""

    cpu_seconds: float
    """On all processors, since it began."""
    resident_bytes: int
    open_fds: int
    max_fds: int
    started: float
    """Unix time."""


class Ready(Message, frozen=True):
    """The member has set itself up and takes part; repeated as its heartbeat from then on."""

    kind: MemberKind
    index: int
    incarnation: int
    setup: EngineSetup | None = None
    group_status: GroupStatus | None = None
    adapters: list[HeldAdapter] = []
    """What became of the adapters of the sheet that it knows, in an engine that has some."""
    use: ProcessUse | None = None


class Heartbeat(Message, frozen=True):
    """The member is alive and still setting itself up; answered by `HeartbeatAck`."""

    kind: MemberKind
    index: int
    incarnation: int
    group_status: GroupStatus | None = None
    adapters: list[HeldAdapter] = []
    use: ProcessUse | None = None


class Goodbye(Message, frozen=True):
    """The member leaves on purpose, or its supervisor saw it die.

    An `index` of -1 stands for whatever number the coordinator gave to this incarnation.
    """

    kind: MemberKind
    index: int
    incarnation: int


class Draining(Message, frozen=True):
    """The member finishes what it has and takes nothing new; its heartbeat until the goodbye."""

    kind: MemberKind
    index: int
    incarnation: int
    group_status: GroupStatus | None = None
    adapters: list[HeldAdapter] = []
    use: ProcessUse | None = None


MemberMessage = Hello | Ready | Heartbeat | Draining | Goodbye


class FrontEndEntry(msgspec.Struct, frozen=True, array_like=True):
    """One front end as engines need to know it."""

    index: int
    incarnation: int
    addresses: FrontEndAddresses
    scope: Scope = EVERYTHING
    protocol: int = 0
    """What it speaks; 0 from coordinators that are older than the field."""


class Welcome(Message, frozen=True):
    """The coordinator accepts a member and tells it where everything is."""

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
    """See `engine.shared.version`; 0 from coordinators that are older than the field."""
    version: str = ""
    """Version of Swell, for people."""
    adapters: AdapterSheet | None = None
    """What engines have to have before they take requests."""
    fleet: FleetOrder | None = None
    """What operators want of all engines."""


class Refused(Message, frozen=True):
    """The member may not join; `field` names the setting that differs, if that is why.

    A refusal that is not final may be lifted soon (the rank's last holder is not known to be
    dead yet): the member keeps asking. A final one with the field "index" says that the member was
    silent for so long that its number was given to another: its process has to end.
    """

    reason: str
    field: str | None = None
    final: bool = True


class HeartbeatAck(Message, frozen=True):
    """Answer to a heartbeat; `known` is False when the member has to say HELLO again."""

    epoch: int
    known: bool


CoordinatorReply = Welcome | Refused | HeartbeatAck
