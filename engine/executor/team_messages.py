"""Messages between the processes of one engine. No torch.

The leader is the engine's own process. Only it knows requests, plans and tokens: before each part
of a step it sends the workers what to compute, as plain arrays.
"""

import msgspec

from engine.distributed.spec import GroupSpec
from engine.shared.config import EngineConfig

GROUP_TIMEOUT = 120.0
"""Seconds that the processes of an engine wait for each other within a step."""


class WorkerLaunch(msgspec.Struct, frozen=True):
    """Launch parameters of a worker process."""

    config: EngineConfig
    engine: int
    """Rank of its engine."""
    rank: int
    """Its rank among the engine's processes; 0 is the leader."""
    size: int
    address: str
    """HOST:PORT of the rendezvous."""
    engines_on_node: int
    commands: int = -1
    """Descriptor of the socket for commands and replies."""


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Arrays as in `AttentionRows`."""

    starts: bytes
    counts: bytes
    first_token: bytes
    block_tables: bytes
    block_size: int
    other_tables: tuple[bytes, ...]


class Whole(msgspec.Struct, frozen=True, array_like=True):
    """Arrays as in `WholeImages`."""

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
    """Adapter slot of each token; empty if no token has one."""
    other_slots: tuple[bytes, ...] = ()
    """KV slots for each layer group after the first."""
    image_tokens: bytes = b""
    """As in `ImageTokens`; empty if there are no image tokens."""
    image_embeddings: bytes = b""
    """Embeddings of these tokens, in the model's compute dtype."""
    whole_images: Whole | None = None


class DummyStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take part in a step without own tokens: run local experts for the group's other engines."""


class PrepareGroup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load the experts for this position in a group of engines; replied to."""

    position: int
    size: int


class JoinGroup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Connect to the other engines' processes; replied to."""

    spec: GroupSpec
    """The group, and the engine's position in it."""


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute logits of `num_rows` hidden states, which are broadcast next."""

    num_rows: int
    adapters: bytes = b""
    """Adapter slots of these rows, as in `Forward`."""


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Look up tokens in the embedding, of which each shard has a part."""

    token_ids: bytes


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load an adapter into a slot.

    Its matrices are broadcast next within the stage, in order, by the stage's first shard.
    """

    slot: int
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]]
    """Shapes of A and B, by the decoder's module names."""
    data: bytes = b""
    """The concatenated matrices, for the first shard of a stage before the leader's."""


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Restore the weights, and allocate an empty KV cache; replied to."""

    num_blocks: int
    fingerprint: str
    """Fingerprint of the leader's weights, which must match the worker's."""


class BeginTrial(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate a KV cache for the largest step, and measure memory; replied to."""

    num_blocks: int


class EndTrial(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free that cache; replied to with the number of blocks that still fit."""


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free the KV cache, and at level 2 the weights; replied to."""

    level: int


class ReadBlock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send the leader the local contents of a KV block."""

    block_id: int


class WriteBlock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Overwrite the local part of a KV block with data that the leader sends next."""

    block_id: int


class TakeWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load the local part of a trainer's weights, keeping the previous ones; replied to.

    The tensors are broadcast next, in order, as stored in checkpoints.
    """

    names: list[str]
    types: list[str]
    shapes: list[list[int]]


class SettleWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free the previous weights, or switch back to them if they exist; replied to."""

    revert: bool


class StartProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start recording a profile; replied to."""


class StopProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write the recorded profile; replied to."""

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
    """Reply of a worker that has started, loaded its part, or executed a command."""

    free_blocks: int
    """KV blocks of its part that fit in memory."""
    error: str = ""
    """Why the command failed; the worker continues."""
    device: str = ""
    """Only in the first reply: its device type, which must match the leader's."""
