import random

import msgspec
import pytest

from server.bench.client import EventParser, decode_chunk

STREAM = (
    b": a comment\n\n"
    b'data: {"a":1}\n\n'
    b"event: named\ndata: two\ndata:lines\n\n"
    b'data: {"text":"\xc3\xa9"}\r\n\r\n'
    b"id: 7\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', b"two\nlines", b'{"text":"\xc3\xa9"}', b"[DONE]"]


@pytest.mark.parametrize("seed", range(50))
def test_events_do_not_depend_on_where_the_bytes_are_cut(seed: int) -> None:
    generator = random.Random(seed)
    parser = EventParser()
    found, rest = [], STREAM
    while rest:
        size = generator.randint(1, 20)
        found += parser.feed(rest[:size])
        rest = rest[size:]
    assert found == EVENTS


def test_events_are_returned_only_when_complete() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\ndata: y\n\n") == [b"x", b"y"]


@pytest.mark.parametrize(
    ("chunk", "shows"),
    [
        (b'{"choices":[{"index":0,"text":"a","finish_reason":null}],"usage":null}', True),
        (b'{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'{"choices":[{"delta":{"content":"a"}}]}', True),
        (b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', True),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True),
        (b'{"choices":[{"delta":{}}]}', False),
    ],
)
def test_only_displayable_deltas_count_as_output(chunk: bytes, shows: bool) -> None:
    assert decode_chunk(chunk).choices[0].shows_output is shows


def test_usage_and_errors_are_read() -> None:
    usage = decode_chunk(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}').usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4)
    assert decode_chunk(b'{"error":{"message":"m"}}').error == {"message": "m"}
    with pytest.raises(msgspec.DecodeError):
        decode_chunk(b"{")
