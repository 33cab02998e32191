"""What a stream keeps for whoever reads it."""

import pytest

from engine.shared.messages import AddRequest, RequestOutput, SamplingParams, TokenLogprob
from server.router.generation_client import ReaderTooSlow
from server.router.token_stream import MAX_BACKLOG, RequestStream

SCORE = TokenLogprob(-0.1, 1, list(range(20)), [-0.1] * 20)


class Owner:
    """Counts what a stream asks its client to end."""

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
    assert len(stream._unread) < 100
    output = await stream.next()
    assert output.token_ids == list(range(1000))
    assert output.logprobs == [SCORE] * 1000
    stream.put(RequestOutput(1, [7], "stop"))
    assert await stream.next() == RequestOutput(1, [7], "stop")


@pytest.mark.parametrize("scored", [False, True])
async def test_a_stream_that_nobody_reads_is_aborted(scored: bool) -> None:
    owner = Owner()
    put = 0
    while not owner.closed:
        owner.stream.put(RequestOutput(1, [put], logprobs=[SCORE] if scored else None))
        put += 1
    weight = 23 if scored else 1
    assert MAX_BACKLOG < put * weight <= MAX_BACKLOG + 64 * weight
    assert owner.stream.finished
    assert len((await owner.stream.next()).token_ids) == put
    with pytest.raises(ReaderTooSlow):
        await owner.stream.next()


async def test_a_stream_that_is_read_may_be_as_long_as_it_likes() -> None:
    owner = Owner()
    for token in range(3 * MAX_BACKLOG // 1000):
        owner.stream.put(RequestOutput(1, [token] * 1000))
        await owner.stream.next()
    assert owner.closed == 0
