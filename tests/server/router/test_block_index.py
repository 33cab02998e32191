"""A front end's index of which engine holds which KV blocks."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.block_table import BlockTable, CacheShape
from engine.scheduler.kv_cache import KVCacheManager
from engine.shared.block_names import ROOT_DIGEST, adapter_root
from engine.shared.messages import (
    ALL_BLOCKS,
    AddRequest,
    EncoderInput,
    KvBlocks,
    KvBlocksQuery,
    SamplingParams,
)
from server.router.block_index import QUERY_TIMEOUT, BlockIndex
from server.router.load_table import Sent
from server.router.route import Route
from tests.server.router.known_engines import entry, setup

SIZE = 4
SETUP = msgspec.structs.replace(setup(), block_size=SIZE, reports_blocks=True)
NUM_BLOCKS = 8


def cache(num_blocks: int = NUM_BLOCKS) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, enable_prefix_caching=True)


def compute(
    kv: KVCacheManager,
    token_ids: list[int],
    root: bytes = ROOT_DIGEST,
    images: Sequence[EncoderInput] = (),
) -> None:
    """Compute and release a sequence with these tokens."""
    table = BlockTable(root, images)
    assert kv.try_admit(table, token_ids, use_cache=True, headroom=0) is not None
    kv.commit(table, token_ids, len(token_ids))
    kv.free(table)


def found(
    kv: KVCacheManager,
    token_ids: list[int],
    root: bytes = ROOT_DIGEST,
    images: Sequence[EncoderInput] = (),
) -> int:
    """Return the number of cached tokens that the engine would find."""
    return kv.needs(BlockTable(root, images), token_ids, use_cache=True)[0]


def request(token_ids: list[int], **fields: object) -> AddRequest:
    message = AddRequest(1, "r", 0, 0, token_ids, SamplingParams(max_tokens=9, seed=1))
    return msgspec.structs.replace(message, **fields)


class Engines:
    """Engines with a KV cache each, and a front end that follows them.

    Queries arrive at once; replies are in flight until the test delivers or drops them.
    """

    def __init__(self, count: int, index: BlockIndex | None = None) -> None:
        self.index = index or BlockIndex(0, 10_000)
        self.now = 0.0
        self.caches = [cache() for _ in range(count)]
        self.routes: dict[int, Route] = {}
        self.under_way: list[KvBlocks] = []
        self.resyncs = 0
        self._incarnations = 0
        self._open: dict[int, KvBlocksQuery] = {}
        for rank in range(count):
            self.restart(rank)

    @property
    def engines(self) -> list[tuple[int, int]]:
        return [route.engine for route in self.routes.values()]

    def restart(self, rank: int) -> None:
        self._incarnations += 1
        incarnation = self._incarnations
        self.caches[rank] = cache()
        self._open.pop(rank, None)
        listed = msgspec.structs.replace(entry(rank, incarnation), setup=SETUP)
        self.routes[rank] = Route(
            entry=listed, sent=Sent(1, incarnation, 0, 0), identity=b"%d" % rank
        )

    def queries_due(self) -> list[KvBlocksQuery]:
        """Query from the front end; engines reply if their blocks have changed."""
        asked = self.index.queries_due(list(self.routes.values()), self.now)
        for to, question in asked:
            self._open[int(to)] = question
        self.answer()
        return [question for _, question in asked]

    def answer(self) -> None:
        for rank, question in list(self._open.items()):
            changes = self.caches[rank].blocks_since(question.after)
            if changes is not None:
                del self._open[rank]
                incarnation = self.routes[rank].entry.incarnation
                self.under_way.append(KvBlocks(rank, incarnation, *changes))

    def deliver(self, place: int = 0) -> None:
        self.resyncs += self.index.take(self.under_way.pop(place))

    def settle(self) -> None:
        """Repeat lost queries and deliver all replies."""
        for _ in range(3):
            self.now += QUERY_TIMEOUT
            self.queries_due()
            while self.under_way:
                self.deliver()

    def cached(self, message: AddRequest, output_token_ids: Sequence[int] = ()) -> dict[int, int]:
        return self.index.cached_tokens(self.engines, message, list(output_token_ids))


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=NUM_BLOCKS * SIZE)
RANKS = st.integers(0, 1)
EVENTS = st.one_of(
    st.tuples(st.just("compute"), RANKS, TOKENS),
    st.tuples(st.just("reset"), RANKS),
    st.tuples(st.just("restart"), RANKS),
    st.tuples(st.just("follow")),
    st.tuples(st.just("deliver"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("wait")),
)


@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=40), asked=st.lists(TOKENS, max_size=6))
def test_index_converges_despite_lost_or_late_messages(
    events: list[tuple[object, ...]], asked: list[list[int]]
) -> None:
    engines = Engines(2)
    for event in events:
        match event:
            case ("compute", int(rank), list(tokens)):
                compute(engines.caches[rank], tokens)
                engines.answer()
            case ("reset", int(rank)):
                engines.caches[rank].reset_prefix_cache()
                engines.answer()
            case ("restart", int(rank)):
                engines.restart(rank)
                assert rank not in engines.cached(request([0] * 9)), "of its predecessor"
            case ("deliver", int(place)) if place < len(engines.under_way):
                engines.deliver(place)
            case ("lose", int(place)) if place < len(engines.under_way):
                del engines.under_way[place]
            case ("follow",):
                engines.queries_due()
            case ("wait",):
                engines.now += QUERY_TIMEOUT
    engines.settle()
    for tokens in asked:
        there = {rank: found(kv, tokens) for rank, kv in enumerate(engines.caches)}
        assert engines.cached(request(tokens)) == {rank: n for rank, n in there.items() if n}


def followed(engines: Engines) -> Engines:
    engines.queries_due()
    while engines.under_way:
        engines.deliver()
    return engines


def test_block_names_equal_those_of_engines_for_salts_adapters_and_images() -> None:
    engines = Engines(1)
    tokens, salt = list(range(9)), b"s" * 16
    image = EncoderInput(2, 4, b"i" * 16, 2, 2, b"")
    kv = engines.caches[0]
    compute(kv, tokens[:5])
    compute(kv, tokens, salt)
    compute(kv, tokens[:5], adapter_root(salt, "v1"))
    compute(kv, tokens[:5], images=[image])
    followed(engines)
    assert engines.cached(request(tokens)) == {0: 4}
    assert engines.cached(request(tokens, cache_root=salt)) == {0: 8}
    assert engines.cached(request(tokens, cache_root=salt, adapter="v1")) == {0: 4}
    assert engines.cached(request(tokens, cache_root=salt, adapter="v2")) == {}
    assert engines.cached(request(tokens, encoder_inputs=[image])) == {0: 4}
    other = msgspec.structs.replace(image, digest=b"j" * 16)
    assert engines.cached(request(tokens, encoder_inputs=[other])) == {}


def test_tokens_so_far_of_moved_request_count_as_prefix() -> None:
    engines = Engines(1)
    compute(engines.caches[0], list(range(9)))
    followed(engines)
    assert engines.cached(request([0, 1, 2]), [3, 4, 5, 6, 7, 8]) == {0: 8}
    assert engines.cached(request([0, 1, 2]), [3, 4, 5, 6, 7]) == {0: 4}, "one is left to compute"


def test_prompt_logprobs_count_no_cached_tokens() -> None:
    engines = Engines(1)
    compute(engines.caches[0], list(range(9)))
    followed(engines)
    scored = request(
        list(range(9)), sampling=SamplingParams(max_tokens=1, seed=1, prompt_logprobs=1)
    )
    assert engines.cached(scored) == {}
    assert engines.cached(scored, [9]) == {0: 8}


def test_engine_is_queried_once_until_answer_or_timeout() -> None:
    engines = Engines(1)
    assert engines.queries_due() == [KvBlocksQuery(0, ALL_BLOCKS)]
    engines.deliver()
    assert engines.queries_due() == [KvBlocksQuery(0, 0)]
    engines.now = QUERY_TIMEOUT / 2
    assert engines.queries_due() == []
    engines.now = QUERY_TIMEOUT
    assert engines.queries_due() == [KvBlocksQuery(0, 0)]


def test_engines_that_report_no_blocks_are_not_queried() -> None:
    engines = Engines(1)
    [route] = engines.routes.values()
    route.entry = msgspec.structs.replace(route.entry, setup=setup())
    assert engines.queries_due() == []
    route.entry = msgspec.structs.replace(route.entry, setup=SETUP)
    route.identity = None
    assert engines.queries_due() == []


def test_an_engine_that_left_is_forgotten_and_frees_its_share() -> None:
    engines = Engines(2)
    for kv in engines.caches:
        compute(kv, list(range(9)))
    followed(engines)
    assert engines.index.size() == 4
    del engines.routes[1]
    engines.queries_due()
    assert engines.index.size() == 2
    assert engines.cached(request(list(range(9)))) == {0: 8}


def test_blocks_beyond_index_size_count_as_not_cached() -> None:
    engines = Engines(2, BlockIndex(0, 4))
    for kv in engines.caches:
        compute(kv, list(range(16)))
    followed(engines)
    assert engines.index.size() == 4
    cached = engines.cached(request(list(range(20))))
    assert cached == {0: 8, 1: 8}


def test_full_resend_after_missed_changes_is_counted() -> None:
    engines = Engines(1)
    followed(engines)
    assert engines.resyncs == 0
    engines.caches[0].reset_prefix_cache()
    compute(engines.caches[0], list(range(9)))
    followed(engines)
    assert engines.resyncs == 1
    assert engines.cached(request(list(range(9)))) == {0: 8}


@pytest.mark.parametrize(
    ("windows", "expected"), [((None, 6), {0: 8}), ((6, None), {0: 8}), ((6,), {0: 8})]
)
def test_index_follows_cache_group_without_window(
    windows: tuple[int | None, ...], expected: dict[int, int]
) -> None:
    engines = Engines(1)
    shape = CacheShape(SIZE, windows, 16)
    engines.caches[0] = KVCacheManager(16, SIZE, enable_prefix_caching=True, shape=shape)
    compute(engines.caches[0], list(range(9)))
    followed(engines)
    assert engines.cached(request(list(range(9)))) == expected
