"""One front end's index of the KV blocks that each engine holds: a state machine without I/O.

Each engine is asked for changes since its last answer, and answers once there are any. An answer
that does not continue the known state is dropped. A front end that is too far behind, missed an
answer or sees a new process gets all names instead. So the index of an engine is either empty or
reflects what it held at some moment.
"""

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from engine.shared.block_names import ROOT_DIGEST, adapter_root, block_digest, short_name, shown_in
from engine.shared.messages import ALL_BLOCKS, AddRequest, KvBlocks, KvBlocksQuery
from server.router.route import Engine, Route

QUERY_TIMEOUT = 5.0
"""Seconds after which an unanswered engine is asked again, since messages can be lost."""


@dataclass(slots=True)
class _EngineBlocks:
    engine: Engine
    block_size: int
    number: int = ALL_BLOCKS
    """Number of the newest known change."""
    names: set[int] = field(default_factory=set)
    queried_at: float | None = None
    """Time of the unanswered request; None if there is none."""


class BlockIndex:
    """Names of all engines' blocks.

    Args:
        max_blocks: maximum names kept; each engine has an equal share, and blocks beyond it are
            treated as not cached.
    """

    def __init__(self, front_end: int, max_blocks: int) -> None:
        self._front_end = front_end
        self._max_blocks = max_blocks
        self._engines: dict[int, _EngineBlocks] = {}

    def size(self) -> int:
        """Return the number of names kept."""
        return sum(len(each.names) for each in self._engines.values())

    def queries_due(
        self, routes: Collection[Route], now: float
    ) -> list[tuple[bytes, KvBlocksQuery]]:
        """Return the requests to send, by engine identity; drop the state of engines that left."""
        connected = {route.engine for route in routes}
        self._engines = {
            rank: each for rank, each in self._engines.items() if each.engine in connected
        }
        return [
            (route.identity, KvBlocksQuery(self._front_end, blocks.number))
            for route in routes
            if route.identity is not None and (blocks := self._due(route, now)) is not None
        ]

    def _due(self, route: Route, now: float) -> _EngineBlocks | None:
        """Return the state of an engine that has to be asked for changes, else None."""
        setup = route.entry.setup
        if setup is None or not setup.reports_blocks:
            return None
        blocks = self._engines.get(route.entry.rank)
        if blocks is None:
            blocks = self._engines[route.entry.rank] = _EngineBlocks(route.engine, setup.block_size)
        elif blocks.queried_at is not None and now - blocks.queried_at < QUERY_TIMEOUT:
            return None
        blocks.queried_at = now
        return blocks

    def take(self, message: KvBlocks) -> bool:
        """Apply an engine's answer.

        Returns:
            Whether it replaced known state of that process, after a reset or lost changes.
        """
        blocks = self._engines.get(message.rank)
        if blocks is None or blocks.engine != (message.rank, message.incarnation):
            return False
        blocks.queried_at = None
        is_reset = message.after == ALL_BLOCKS
        if not is_reset and message.after != blocks.number:
            return False
        was_known = blocks.number != ALL_BLOCKS
        blocks.number = message.number
        if is_reset:
            blocks.names = set()
        blocks.names.difference_update(array("Q", message.removed))
        room = max(0, self._max_blocks // len(self._engines) - len(blocks.names))
        blocks.names.update(array("Q", message.stored)[:room])
        return is_reset and was_known

    def cached_tokens(
        self, engines: Collection[Engine], message: AddRequest, output_token_ids: list[int]
    ) -> dict[int, int]:
        """Return the number of a sequence's tokens cached on each engine, by rank; zeros omitted.

        As in engines, at least one token is left to compute.
        """
        alive = [
            blocks
            for engine in engines
            if (blocks := self._engines.get(engine[0])) is not None
            and blocks.engine == engine
            and blocks.names
        ]
        computes_all = message.sampling.prompt_logprobs is not None and not output_token_ids
        if not alive or computes_all:
            return {}
        size = alive[0].block_size
        found: dict[int, int] = {}
        length = 0
        for name in _names_of(message, output_token_ids, size):
            still = [each for each in alive if name in each.names]
            if len(still) < len(alive):
                found |= {each.engine[0]: length for each in alive if name not in each.names}
                alive = still
                if not alive:
                    break
            length += size
        found |= {each.engine[0]: length for each in alive}
        return {rank: tokens for rank, tokens in found.items() if tokens}


def _names_of(message: AddRequest, output_token_ids: list[int], size: int) -> Iterator[int]:
    """Yield the names of a sequence's full blocks, except a block that holds its last token."""
    token_ids = message.prompt_token_ids
    if output_token_ids:
        token_ids = token_ids + output_token_ids
    digest = adapter_root(message.cache_root or ROOT_DIGEST, message.adapter)
    images = message.encoder_inputs
    for start in range(0, (len(token_ids) - 1) // size * size, size):
        end = start + size
        shown = shown_in(images, start, end) if images else ()
        digest = block_digest(digest, token_ids[start:end], shown)
        [name] = array("Q", short_name(digest))
        yield name
