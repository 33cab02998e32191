"""One request costs a front end little more than its body, whatever it holds."""

import contextlib
import http.client
import socket
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from benchmarks.running_stack import RunningStack
from server.limits import MAX_JSON_CONTAINERS, MAX_JSON_VALUES, MAX_MESSAGES
from tests.hostile.measure import MAX_GROWTH, MAX_STALL, cost_of, front_end

pytestmark = pytest.mark.stack

BODY = 4 * 2**20
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
KEY = "hostile-but-known"


def filled(start: bytes, piece: bytes, count: int, end: bytes) -> bytes:
    """Return a body of many pieces, as many as the limit of bodies lets in."""
    count = min(count, (BODY - len(start) - len(end)) // len(piece) - 1)
    return start + piece * count + piece.rstrip(b",") + end


MESSAGE = b'{"role":"user","content":""},'
BODIES = {
    "zeros as messages": filled(b'{"messages":[', b"0,", 10**7, b"]}"),
    "zeros as input": filled(b'{"input":[', b"0,", 10**7, b"]}"),
    "token ids": filled(b'{"prompt":[', b"300,", MAX_JSON_VALUES - 10, b"]}"),
    "token ids to decode": filled(b'{"tokens":[', b"300,", MAX_JSON_VALUES - 10, b"]}"),
    "wrong token ids": filled(b'{"prompt":[', b"-1,", MAX_JSON_VALUES - 10, b"]}"),
    "lists of token ids": filled(b'{"prompt":[', b"[1],", 2000, b"]}"),
    "messages": filled(b'{"messages":[', MESSAGE, MAX_MESSAGES - 1, b"]}"),
    "too many messages": filled(b'{"messages":[', MESSAGE, 10**7, b"]}"),
    "unknown objects": filled(b'{"prompt":"x","y":[', b"{},", MAX_JSON_CONTAINERS - 4, b"]}"),
    "unknown texts": filled(b'{"prompt":"x","y":[', b'"a,b",', MAX_JSON_VALUES // 2, b"]}"),
    "nested": b'{"messages":' + b"[" * (BODY - 100),
    "template arguments": filled(
        b'{"messages":[{"role":"user","content":""}],"chat_template_kwargs":{"a":[',
        b'{"":0},', MAX_JSON_CONTAINERS - 10, b"]}}",
    ),
}  # fmt: skip


TEXTS = {
    "backslashes": b"\\\\",
    "words": b"qxzj ",
    "ideographs": "語".encode(),
    "one word": b"a",
    "blanks": b" ",
}

SHOWN = (
    "/",
    "/metrics",
    "/metrics/engine/0",
    "/status.json",
    "/openapi.json",
    "/docs",
    "/v1/models",
)


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[RunningStack, int]]:
    with front_end("--api-key", KEY) as running:
        warm_up(running[0])
        yield running


def warm_up(stack: RunningStack) -> None:
    """Send a request to every endpoint: first uses load and compile things."""
    for path in PATHS:
        for body in (b"{}", b'{"prompt":"x","messages":[{"role":"user","content":"x"}]}'):
            post(stack, path, body, KEY)


def post(stack: RunningStack, path: str, body: bytes, key: str | None) -> int:
    """Return the status of the answer."""
    address = urlsplit(stack.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


@pytest.mark.parametrize("name", BODIES)
def test_no_body_costs_more_than_its_share(stack: tuple[RunningStack, int], name: str) -> None:
    running, pid = stack
    body = BODIES[name]
    statuses: set[int] = set()

    def attack() -> None:
        for path in PATHS:
            statuses.add(post(running, path, body, KEY))

    cost = cost_of(attack, running, pid)
    print(f"{name}: {cost.growth / 2**20:.0f} MiB, {1000 * cost.stall:.0f} ms, {statuses}")
    assert cost.growth <= MAX_GROWTH + len(body)
    assert cost.stall <= MAX_STALL
    assert statuses <= {200, 400}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_no_model_holds_is_not_tokenized(
    stack: tuple[RunningStack, int], name: str
) -> None:
    running, pid = stack
    body = filled(b'{"prompt":"', TEXTS[name], 10**7, b'"}')
    cost = cost_of(lambda: post(running, "/tokenize", body, KEY), running, pid)
    print(f"{name}: {cost.growth / 2**20:.0f} MiB, {1000 * cost.stall:.0f} ms")
    assert cost.growth <= MAX_GROWTH + len(body)
    assert cost.stall <= MAX_STALL


@pytest.mark.parametrize("path", SHOWN)
def test_what_a_front_end_shows_is_made_fast(stack: tuple[RunningStack, int], path: str) -> None:
    running, pid = stack
    headers = {"Authorization": f"Bearer {KEY}"}

    def attack() -> None:
        for _ in range(5):
            request = urllib.request.Request(running.url + path, headers=headers)
            urllib.request.urlopen(request, timeout=30).close()

    cost = cost_of(attack, running, pid)
    print(f"{path}: {cost.growth / 2**20:.0f} MiB, {1000 * cost.stall:.0f} ms")
    assert cost.growth <= MAX_GROWTH
    assert cost.stall <= MAX_STALL


def test_without_a_key_nothing_is_read(stack: tuple[RunningStack, int]) -> None:
    running, pid = stack
    body = BODIES["zeros as messages"]

    def attack() -> None:
        for path in (*PATHS, "/metrics", "/", "/nowhere"):
            assert post(running, path, body, None) in (401, 405)

    cost = cost_of(attack, running, pid)
    assert cost.growth <= 4 * 2**20
    assert cost.stall <= MAX_STALL


def test_sixteen_unfinished_uploads_hold_what_they_sent(stack: tuple[RunningStack, int]) -> None:
    running, pid = stack
    address = urlsplit(running.url)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {{}}\r\n\r\n"
    )

    def upload(declared: int, sent: int) -> socket.socket:
        client = socket.create_connection((address.hostname or "", address.port or 0), timeout=30)
        with contextlib.suppress(ConnectionError):
            client.sendall(head.format(declared).encode() + b" " * sent)
        return client

    def attack() -> None:
        clients = [upload(60 * 2**20, 2**20) for _ in range(16)]
        clients += [upload(BODY, BODY - 1) for _ in range(16)]
        assert post(running, "/tokenize", b'{"prompt":"x"}', KEY) == 200
        for client in clients:
            client.close()

    cost = cost_of(attack, running, pid)
    assert cost.growth <= 16 * BODY + MAX_GROWTH
    assert cost.stall <= MAX_STALL


def test_trailers_without_end_cost_nothing(stack: tuple[RunningStack, int]) -> None:
    running, pid = stack
    address = urlsplit(running.url)
    start = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\n"
    )

    def attack() -> None:
        def trail() -> None:
            with (
                socket.create_connection((address.hostname or "", address.port or 0)) as client,
                contextlib.suppress(ConnectionError),
            ):
                client.sendall(start)
                for _ in range(400):
                    client.sendall(b"X: %s\r\n" % (b"x" * 1000) * 100)

        trails = [threading.Thread(target=trail) for _ in range(4)]
        for thread in trails:
            thread.start()
        for thread in trails:
            thread.join()

    cost = cost_of(attack, running, pid)
    assert cost.growth <= 16 * 2**20
    assert cost.stall <= MAX_STALL
