"""Messages between the processes of one engine. No torch.

The first of them, the leader, is the engine's own process. It alone knows requests, plans and
tokens: it tells the others before each part of a step what to compute, as plain arrays.
"""

import msgspec

from engine.distributed.spec import GroupSpec
from engine.shared.config import EngineConfig

GROUP_TIMEOUT = 120.0
"""Seconds that the processes of an engine wait for each other inside a step."""


class WorkerLaunch(msgspec.Struct, frozen=True):
    """What a worker process is started with."""

    config: EngineConfig
    engine: int
    """Rank of its engine."""
    rank: int
    """Its own among the engine's processes; the leader's is 0."""
    size: int
    address: str
    """HOST:PORT where the processes meet."""
    engines_on_node: int
    commands: int = -1
    """Descriptor of the socket on which it is told what to do, and answers."""


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Arrays as in `AttentionRows`."""

    starts: bytes
    counts: bytes
    first_token: bytes
    block_tables: bytes
    block_size: int
    other_tables: tuple[bytes, ...]


class Whole(msgspec.Struct, frozen=True, array_like=True):
    """As in `WholeImages`."""

    queries: bytes
    computed: bytes
    rows: Rows


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run all layers of the stage. Arrays as in `StepTokens`."""

    token_ids: bytes
    positions: bytes
    slots: bytes
    rows: Rows
    adapters: bytes = b""
    """Slot of each token's adapter; empty if none has one."""
    other_slots: tuple[bytes, ...] = ()
    """Of the groups of layers after the first."""
    image_tokens: bytes = b""
    """As in `ImageTokens`; empty if no token stands for an image."""
    image_embeddings: bytes = b""
    """Of these tokens, in the type that the model computes in."""
    whole_images: Whole | None = None


class DummyStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run the experts that are here for the other engines of the group."""


class PrepareGroup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Hold the experts of this place of the engine in a group of engines; answered."""

    position: int
    size: int


class JoinGroup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Meet the other engines' processes; answered."""

    spec: GroupSpec
    """The engine's place among the engines."""


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute logits of so many states, which are broadcast next."""

    num_rows: int
    adapters: bytes = b""
    """As for `Forward`, of these rows."""


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Look these tokens up in the embedding, of which each shard has a part."""

    token_ids: bytes


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put an adapter into a slot.

    Its matrices are broadcast next in the stage, one after the other, by the stage's first shard.
    """

    slot: int
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]]
    """Of A and B by the decoder's names of the modules."""
    data: bytes = b""
    """The matrices one after the other, for the first shard of a stage before the leader's."""


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Have the weights, and an empty KV cache of so many blocks; answered."""

    num_blocks: int
    fingerprint: str
    """Of the leader's weights, which the worker's have to be parts of."""


class BeginTrial(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Have a KV cache of so many blocks for the largest step, and watch memory; answered."""

    num_blocks: int


class EndTrial(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free that cache and answer with the blocks that the step has left room for."""


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free the KV cache and at level 2 the weights; answered."""

    level: int


class ReadBlock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send the leader what a KV block holds here."""

    block_id: int


class WriteBlock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Replace what a KV block holds here by what the leader sends next."""

    block_id: int


class TakeWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load this part of weights of a trainer, and keep those before; answered.

    The tensors are broadcast next, as they are in checkpoints, one after the other.
    """

    names: list[str]
    types: list[str]
    shapes: list[list[int]]


class SettleWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free the weights that were replaced last, or have them back if they are there; answered."""

    back: bool


class StartProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin to record; answered."""


class StopProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write what was recorded; answered."""

    path: str


Command = (
    Forward
    | DummyStep
    | PrepareGroup
    | JoinGroup
    | Logits
    | Embed
    | LoadAdapter
    | Allocate
    | BeginTrial
    | EndTrial
    | Sleep
    | ReadBlock
    | WriteBlock
    | TakeWeights
    | SettleWeights
    | StartProfile
    | StopProfile
)


class WorkerReply(msgspec.Struct, frozen=True, array_like=True):
    """A worker has started, loaded its part, or carried out a command."""

    free_blocks: int
    """KV blocks, of its part, that it has memory for."""
    error: str = ""
    """Why it could not; the worker goes on."""
    device: str = ""
    """In the first answer: the kind of its device, which has to be the leader's too."""
