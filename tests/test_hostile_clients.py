"""A running stack answers whatever comes as documented, and keeps nothing of clients that leave."""

import asyncio
import json
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.running_stack import RunningStack
from tests.support.http import MODEL, fetch
from tests.support.metrics import scrape
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

AT_ONCE = 16
EXPECTED = {100, 200, 400, 403, 404, 405, 408, 411, 413, 415, 429, 431, 501, 505}
"""501 and 505 are for methods and versions of HTTP that are not served."""
QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def quick_stack() -> Iterator[RunningStack]:
    flags = ("--simulated-step-us", "300", "--simulated-token-us", "0", "--admin-key", "secret")
    # Each storm lasts as long as what never comes is waited for.
    times = ("--receive-timeout", "2", "--keep-alive-timeout", "2")
    with RunningStack("--executor", "simulated", "--log-level", "error", *flags, *times) as running:
        before = {name: process.pid for name, process in running.processes().items()}
        yield running
        until(lambda: not load_left(running), "nothing is left")
        after = {name: process.pid for name, process in running.processes().items()}
        assert after == before, f"a process died:\n{running.output}"
        assert "Traceback" not in running.output


def load_left(running: RunningStack) -> list[str]:
    """Return the samples that say that requests or KV blocks are in use."""
    names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    found = re.findall(rf"^(swell_(?:{names})\{{[^}}]*\}}) (\S+)$", scrape(running.url), re.M)
    assert len(found) >= 6
    return [f"{name} {value}" for name, value in found if float(value) != 0]


# -- what the document says ------------------------------------------------------------------------


def test_every_operation_answers_as_documented(quick_stack: RunningStack) -> None:
    import schemathesis  # takes a second, in each process that collects these tests
    from schemathesis.checks import CHECKS

    document = schemathesis.openapi.from_url(f"{quick_stack.url}/openapi.json")
    names = (
        "not_a_server_error", "status_code_conformance", "content_type_conformance",
        "response_schema_conformance", "response_headers_conformance",
    )  # fmt: skip
    checks = [CHECKS.get_one(name) for name in names]
    answers: Counter[int] = Counter()

    for found in document.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]

        @settings(QUICK, max_examples=4)
        @given(operation.as_strategy())
        def conforms(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)
            response = case.call(timeout=PATIENCE)
            answers[response.status_code] += 1
            case.validate_response(response, checks=checks)

        conforms()
    assert {200, 400, 403, 404} <= answers.keys()


# -- bodies, headers and hang-ups ------------------------------------------------------------------

numbers: st.SearchStrategy[Any] = st.sampled_from(
    [None, -1, 0, 1, 2, 5, 40, 0.5, 1e308, 10**30, "x", True, [], {}]
)
texts = st.sampled_from(["", "ROMEO:", "a" * 300, "\x00é🎭", "<|im_end|>", None, 7])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
forms: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        {},
        {"json": PERSON},
        {"json": PERSON, "disable_any_whitespace": True},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": "{"},
        {"regex": "[a-z ]{5,300}"},
        {"regex": "(a{1000}){1000}"},
        {"regex": "[a-"},
        {"choice": ["yes", "no"]},
        {"choice": []},
        {"grammar": "root ::= [0-9]+"},
        {"grammar": "start: <|im_end|>"},
        {"grammar": "\n" * 500},
        {"regex": "a", "choice": ["b"]},
        {"nothing": 1},
        7,
    ]
)
formats = st.sampled_from(
    [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "x"}}},
        "json",
    ]
)
fields = {
    "max_tokens": st.sampled_from([None, 0, 1, 5, 30, 300, 900, 10**9, -1, "x"]),
    "temperature": numbers, "top_p": numbers, "top_k": numbers, "min_p": numbers,
    "n": st.sampled_from([None, 1, 2, 5, 0, 1000]), "best_of": st.sampled_from([None, 1, 3, 500]),
    "stream": st.sampled_from([True, True, True, False, None, "yes"]),
    "stream_options": st.sampled_from([None, {"include_usage": True}, {}, 1]),
    "stop": st.sampled_from([None, "e", ["a", "b"], [], "", ["x"] * 40, 3]),
    "logprobs": st.sampled_from([None, True, False, 0, 3, 99]),
    "top_logprobs": st.sampled_from([None, 2, -1]), "echo": st.sampled_from([None, True, 1]),
    "logit_bias": st.sampled_from([None, {"5": 3}, {"x": 1}, {"999999": 1}, {"1": 1e9}]),
    "seed": st.sampled_from([None, 0, -(2**63), 2**63, 1.5]), "min_tokens": numbers,
    "presence_penalty": numbers, "repetition_penalty": numbers, "ignore_eos": st.booleans(),
    "stop_token_ids": st.sampled_from([None, [1], [-1], [10**9], "1"]),
    "truncate_prompt_tokens": numbers, "priority": numbers, "user": texts, "suffix": texts,
    "structured_outputs": forms, "response_format": formats, "request_id": texts,
    "model": st.sampled_from([None, MODEL, "other", 1]),
}  # fmt: skip
prompts = texts | st.sampled_from([[], [1, 2, 3], [[5], [6, 7]], ["a", "b"], [10**9], [[]], {}])
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": texts}
    ),
    max_size=3,
)


def some_of(options: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with a few of these fields: few enough that some requests are right."""
    return st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: options[name] for name in names})
    )


requests = st.one_of(
    st.tuples(
        st.just("/v1/completions"),
        st.builds(lambda more, prompt: {"prompt": prompt, **more}, some_of(fields), prompts),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        st.builds(lambda more, turns: {"messages": turns, **more}, some_of(fields), messages),
    ),
)
headers = st.lists(
    st.sampled_from(
        [
            "X-Request-Id: one", "X-Request-Id: \x01", "X-Request-Id: " + "i" * 400,
            "X-data-parallel-rank: 1", "X-data-parallel-rank: -1", "X-data-parallel-rank: 0 1",
            "Accept: text/event-stream", "Accept-Encoding: gzip", "Connection: close",
            "Authorization: Bearer nobody", "Origin: http://elsewhere", "Expect: 100-continue",
            "Cookie: " + "c" * 3000, "Content-Type: text/plain", "Content-Encoding: gzip",
            "Transfer-Encoding: chunked", "Content-Length: 5", "Host: x", "X-\xff: \xff",
            "traceparent: 00-x",
        ]
    ),
    max_size=2,
)  # fmt: skip
cuts = st.sampled_from([None, None, 0, 1, 200, 600, 2000])
"""Bytes of the answer after which the client hangs up; None reads all of it."""


class Visit(NamedTuple):
    """What one client does."""

    path: str
    body: bytes
    headers: list[str]
    cut: int | None
    abrupt: bool

    def __repr__(self) -> str:
        return f"<{self.path} {self.headers} {self.body[:300]!r} {self.cut} {self.abrupt}>"

    def wire(self) -> bytes:
        """Return the request as it is sent."""
        head = [
            f"POST {self.path} HTTP/1.1",
            "Host: swell",
            "Content-Type: application/json",
            f"Content-Length: {len(self.body)}",
            *self.headers,
        ]
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + self.body


visits = st.builds(
    lambda request, more, cut, abrupt: Visit(
        request[0], json.dumps(request[1]).encode(), more, cut, abrupt
    ),
    requests,
    headers,
    cuts,
    st.booleans(),
)
garbage = st.builds(
    lambda path, body: Visit(path, body, [], None, False),
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/", "/nowhere", "/%00", "*"]),
    st.binary(max_size=60)
    | st.sampled_from([b"[" * 5000, b'{"prompt": "' + b"a" * 70_000, b"null", b"{}", b"\xff"]),
)


async def visit(host: str, port: int, what: Visit) -> int | None:
    """Do it; return the status of the answer if there is one."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(what.wire())
        if what.cut == 0:
            return None
        answer = await asyncio.wait_for(_read(reader, what.cut), 2 * PATIENCE)
        found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
        return int(found[1]) if found else None
    except ConnectionError:
        return None
    finally:
        if what.abrupt:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


async def _read(reader: asyncio.StreamReader, cut: int | None) -> bytes:
    """Read until the cut, the end of the answer, or half a second of silence after its head."""
    answer = b""
    while cut is None or len(answer) < cut:
        head, separator, body = answer.partition(b"\r\n\r\n")
        patience = 0.5 if separator and b"event-stream" not in head else 20
        length = re.search(rb"content-length: (\d+)", head.lower())
        complete = separator and length is not None and len(body) >= int(length[1])
        if complete or body.endswith(b"0\r\n\r\n"):
            break
        try:
            piece = await asyncio.wait_for(reader.read(4096), patience)
        except TimeoutError:
            break
        if not piece:
            break
        answer += piece
    return answer


def test_no_request_breaks_or_leaks_anything(quick_stack: RunningStack) -> None:
    address = urlsplit(quick_stack.url)
    assert address.hostname is not None
    assert address.port is not None
    host, port = address.hostname, address.port
    statuses: Counter[int | None] = Counter()

    @settings(QUICK, max_examples=12)
    @given(st.lists(visits | garbage, min_size=AT_ONCE, max_size=AT_ONCE))
    def storm(guests: list[Visit]) -> None:
        async def all_at_once() -> list[int | None]:
            return await asyncio.gather(*(visit(host, port, guest) for guest in guests))

        for status, guest in zip(asyncio.run(all_at_once()), guests, strict=True):
            statuses[status] += 1
            assert status is None or status in EXPECTED, (status, guest)

    storm()
    assert statuses[200] >= 10, statuses
    assert statuses[400] >= 10, statuses
    until(lambda: not load_left(quick_stack), "nothing is left")
    assert fetch(f"{quick_stack.url}/ready").status == 200
