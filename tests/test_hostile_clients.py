"""A running stack answers whatever comes, and keeps nothing of clients that leave."""

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

from benchmarks.hostile.bodies import bodies
from benchmarks.hostile.operations import OPERATIONS
from benchmarks.running_stack import RunningStack
from tests.support.http import fetch
from tests.support.metrics import scrape
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

AT_ONCE = 16
EXPECTED = {100, 200, 400, 403, 404, 405, 408, 411, 413, 415, 429, 431, 501, 505}
"""501 and 505 are for methods and versions of HTTP that are not served."""
QUICK = settings(
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def quick_stack() -> Iterator[RunningStack]:
    flags = (
        "--simulated-step-us", "300", "--simulated-token-us", "0", "--admin-key", "secret",
        "--min-ready-engines", "2",
    )  # fmt: skip
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


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
MOST = 1 << 12
"""Characters of the bodies that are sent here; tests/hostile sends the megabytes."""
LONG = {"stream": True, "max_tokens": 300, "max_output_tokens": 300}


def bodies_of(document: dict[str, Any]) -> st.SearchStrategy[tuple[str, bytes]]:
    """Return what makes a path with a right body for it, or with one that has a wrong field."""
    made: list[st.SearchStrategy[tuple[str, bytes]]] = []
    for path in PATHS:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        right = OPERATIONS[path].rights[0]
        long = right | {name: LONG[name] for name in LONG if name in right or name == "stream"}
        wrong = [
            body.text.encode("utf-8", "surrogatepass")
            for body in bodies(schema["schema"], document, [right])
            if sum(map(len, body.parts)) <= MOST
        ]
        rights = [json.dumps(each).encode() for each in (right, long)]
        made.append(st.tuples(st.just(path), st.sampled_from(rights) | st.sampled_from(wrong)))
    return st.one_of(made)


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

    visits = st.builds(
        lambda request, more, cut, abrupt: Visit(request[0], request[1], more, cut, abrupt),
        bodies_of(json.loads(fetch(f"{quick_stack.url}/openapi.json").text)),
        headers,
        cuts,
        st.booleans(),
    )

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
