"""Which engine holds which KV blocks, as one front end knows it: a state machine without I/O.

Each engine is asked for what has changed since the last answer, and answers when something has. An
answer that does not continue the known state is dropped. A front end that is too far behind, has
lost an answer or meets a new process gets all names instead. So the index of an engine is empty, or
what the engine held at some moment.
"""

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from engine.shared.block_names import ROOT_DIGEST, adapter_root, block_digest, short_name, shown_in
from engine.shared.messages import ALL_BLOCKS, AddRequest, KvBlocks, KvBlocksWanted
from server.router.route import Engine, Route

ASK_AGAIN = 5.0
"""Seconds after which an engine is asked again: the question or the answer may be lost."""


@dataclass(slots=True)
class _Held:
    engine: Engine
    block_size: int
    number: int = ALL_BLOCKS
    """Of the newest change that is known."""
    names: set[int] = field(default_factory=set)
    asked_at: float | None = None
    """When it was asked what it has not answered yet."""


class BlockIndex:
    """The names of all engines' blocks.

    Args:
        front_end: this front end's number.
        max_blocks: names that are kept; each engine has an equal share, and what does not fit
            there is taken for not cached.
    """

    def __init__(self, front_end: int, max_blocks: int) -> None:
        self._front_end = front_end
        self._max_blocks = max_blocks
        self._held: dict[int, _Held] = {}

    def size(self) -> int:
        """Return how many names are kept now."""
        return sum(len(each.names) for each in self._held.values())

    def follow(self, routes: Collection[Route], now: float) -> list[tuple[bytes, KvBlocksWanted]]:
        """Return what to ask the engines that are there, by identity; forget those that are not."""
        there = {route.engine for route in routes}
        self._held = {rank: each for rank, each in self._held.items() if each.engine in there}
        return [
            (route.identity, KvBlocksWanted(self._front_end, held.number))
            for route in routes
            if route.identity is not None and (held := self._due(route, now)) is not None
        ]

    def _due(self, route: Route, now: float) -> _Held | None:
        """Return what is known of an engine if it has to be asked for more."""
        setup = route.entry.setup
        if setup is None or not setup.tells_blocks:
            return None
        held = self._held.get(route.entry.rank)
        if held is None:
            held = self._held[route.entry.rank] = _Held(route.engine, setup.block_size)
        elif held.asked_at is not None and now - held.asked_at < ASK_AGAIN:
            return None
        held.asked_at = now
        return held

    def take(self, message: KvBlocks) -> bool:
        """Take an engine's answer.

        Returns:
            Whether it replaces what was known of that process: a reset, or changes were lost.
        """
        held = self._held.get(message.rank)
        if held is None or held.engine != (message.rank, message.incarnation):
            return False
        held.asked_at = None
        is_anew = message.after == ALL_BLOCKS
        if not is_anew and message.after != held.number:
            return False
        was_known = held.number != ALL_BLOCKS
        held.number = message.number
        if is_anew:
            held.names = set()
        held.names.difference_update(array("Q", message.removed))
        room = max(0, self._max_blocks // len(self._held) - len(held.names))
        held.names.update(array("Q", message.stored)[:room])
        return is_anew and was_known

    def cached_tokens(
        self, engines: Collection[Engine], message: AddRequest, output_token_ids: list[int]
    ) -> dict[int, int]:
        """Return how many tokens of a sequence each engine has cached, by rank, where any are.

        At least one token is left to compute, as in engines.
        """
        alive = [
            held
            for engine in engines
            if (held := self._held.get(engine[0])) is not None
            and held.engine == engine
            and held.names
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
    """Yield the names of a sequence's full blocks, without the one of its last token."""
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
