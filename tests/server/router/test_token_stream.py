"""Buffering of a token stream for its reader."""

import asyncio

import pytest

from engine.shared.messages import AddRequest, RequestOutput, SamplingParams, TokenLogprob
from server.limits import MAX_UNREAD
from server.router.token_stream import ReaderTooSlow, RequestStream, UnreadOutputs, merge, weight

SCORE = TokenLogprob(-0.1, 1, list(range(20)), [-0.1] * 20)


class Owner:
    """Counts the aborts that a stream requests from its client."""

    def __init__(self) -> None:
        request = AddRequest(1, "r", 0, 0, [1], SamplingParams(max_tokens=10**6, seed=1))
        self.closed = 0
        self.stream = RequestStream(request, self._close)

    def _close(self, stream: RequestStream) -> None:
        assert not stream.finished
        self.closed += 1


async def test_unread_outputs_are_merged_and_none_is_lost() -> None:
    stream = Owner().stream
    for token in range(1000):
        stream.put(RequestOutput(1, [token], logprobs=[SCORE], num_cached_tokens=0))
    assert len(stream._pieces) < 100
    outputs: list[RequestOutput] = []
    while sum(len(each.token_ids) for each in outputs) < 1000:
        outputs.append(await stream.next())
        assert weight(outputs[-1]) <= 1024 + 64 * 23, "in parts that take little time to show"
    assert merge(outputs).token_ids == list(range(1000))
    assert merge(outputs).logprobs == [SCORE] * 1000
    stream.put(RequestOutput(1, [7], "stop"))
    assert await stream.next() == RequestOutput(1, [7], "stop")


@pytest.mark.parametrize("scored", [False, True])
async def test_unread_stream_is_aborted(scored: bool) -> None:
    owner = Owner()
    put = 0
    while not owner.closed:
        owner.stream.put(RequestOutput(1, [put], logprobs=[SCORE] if scored else None))
        put += 1
    each = 23 if scored else 1
    assert MAX_UNREAD < put * each <= MAX_UNREAD + each
    assert owner.stream.finished
    read = 0
    while read < put:
        read += len((await owner.stream.next()).token_ids)
    with pytest.raises(ReaderTooSlow):
        await owner.stream.next()


async def test_read_stream_has_unlimited_length() -> None:
    owner = Owner()
    for token in range(3 * MAX_UNREAD // 1000):
        owner.stream.put(RequestOutput(1, [token] * 1000))
        await owner.stream.next()
    assert owner.closed == 0


def sequences(count: int) -> tuple[UnreadOutputs, list[RequestStream]]:
    unread = UnreadOutputs()
    request = AddRequest(1, "r", 0, 0, [1], SamplingParams(max_tokens=10**6, seed=1))
    return unread, [RequestStream(request, lambda _: None, None, unread) for _ in range(count)]


async def test_unread_outputs_of_many_sequences_are_returned_in_order() -> None:
    unread, streams = sequences(40)
    given: dict[int, list[int]] = {index: [] for index in range(40)}
    found: dict[int, list[int]] = {index: [] for index in range(40)}
    for step in range(300):
        for index in range(step % 40, 40, 1 + step % 3):
            given[index].append(step)
            streams[index].put(RequestOutput(1, [step]))
        if step % 50 == 49:
            for index, output in await unread.next():
                found[index] += output.token_ids
    streams[7].fail(LookupError("an engine died"))
    while found != given:
        for index, output in await unread.next():
            found[index] += output.token_ids
    with pytest.raises(LookupError):
        await unread.next()
    assert unread._weight == 0


async def test_unread_outputs_are_bounded_over_all_sequences() -> None:
    unread, streams = sequences(128)
    while not streams[0].finished:
        for stream in streams:
            if not stream.finished:
                stream.put(RequestOutput(1, [7], logprobs=[SCORE]))
    assert unread._weight < 1.1 * MAX_UNREAD
    assert all(stream.finished for stream in streams)


async def test_waiting_reader_is_never_too_slow() -> None:
    unread, streams = sequences(2)
    reading = asyncio.create_task(unread.next())
    await asyncio.sleep(0)
    for _ in range(2):
        streams[1].put(RequestOutput(1, [7] * MAX_UNREAD))
    assert [index for index, _ in await reading] == [1]
    assert not streams[1].finished
