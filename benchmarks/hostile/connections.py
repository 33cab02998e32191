"""Clients that are hostile in how they send and read, not in their JSON.

Each function attacks a server at (host, port), ends by itself within seconds, and returns a short
description of the outcome.
"""

import contextlib
import select
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

Address = tuple[str, int]
Attack = Callable[[Address], str]

_POLL_INTERVAL = 0.05
"""Seconds between checks whether an exchange is over."""
_PATIENCE = 8.0
"""Seconds after which an attack ends even if the server does not stop it."""
FOOLED = "fooled:"
"""Prefix of the outcome of an attack that got something it must not get."""
_JSON_HEAD = "POST {path} HTTP/1.1\r\nHost: swell\r\nContent-Type: application/json\r\n"


def address_of(url: str) -> Address:
    """Return the host and the port of a server."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _head(path: str, *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return (_JSON_HEAD.format(path=path) + more + "\r\n").encode()


def request(path: str, body: bytes, *headers: str) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    return _head(path, f"Content-Length: {len(body)}", *headers) + body


def exchange(
    address: Address, wire: bytes, timeout: float = 30.0, over: threading.Event | None = None
) -> tuple[int, bytes]:
    """Send a request on a new connection and read the answer; disconnect once `over` is set.

    Returns:
        Its status, 0 if there was none, and the data after its head.
    """
    data = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout) as connection:
        connection.settimeout(timeout)
        # A server that answers early closes the connection during the send.
        with contextlib.suppress(OSError):
            connection.sendall(wire)
        with contextlib.suppress(OSError):
            while not complete(data):
                if over is not None:
                    while not select.select([connection], [], [], _POLL_INTERVAL)[0]:
                        if over.is_set():
                            return 0, data
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0), body


def complete(data: bytes) -> bool:
    """Return whether an answer has been received to its end."""
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return body.endswith(b"0\r\n\r\n")


def _stream_of(address: Address, first: bytes, piece: bytes, limit: int) -> str:
    """Send `first`, then `piece` repeatedly until the server closes, up to `limit` bytes."""
    sent, started_at = 0, time.monotonic()
    with socket.create_connection(address, 5) as connection:
        connection.settimeout(1)
        try:
            connection.sendall(first)
            while sent < limit and time.monotonic() - started_at < _PATIENCE:
                connection.sendall(piece)
                sent += len(piece)
        except TimeoutError:
            return f"not read after {sent >> 20} MB"
        except OSError:
            return f"cut off after {sent >> 20} MB"
        with contextlib.suppress(OSError):
            return f"{sent >> 20} MB taken, {connection.recv(12)!r}"
    return f"{sent >> 20} MB taken"


def trailers(address: Address) -> str:
    """Send endless header lines after the last chunk."""
    first = _head("/v1/completions", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n"
    return _stream_of(address, first, b"x-a: b\r\n" * 8192, 64 << 20)


def one_trailer(address: Address) -> str:
    """Send an endless header line after the last chunk."""
    first = _head("/v1/completions", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\nx-a: "
    return _stream_of(address, first, b"b" * 65536, 64 << 20)


def chunk_extensions(address: Address) -> str:
    """Send a chunk with an endless extension."""
    first = _head("/v1/completions", "Transfer-Encoding: chunked") + b"2;x="
    return _stream_of(address, first, b"y" * 65536, 64 << 20)


def tiny_chunks(address: Address) -> str:
    """Send a body in one-byte chunks."""
    first = _head("/v1/completions", "Transfer-Encoding: chunked") + b'1\r\n"\r\n'
    return _stream_of(address, first, b"1\r\na\r\n" * 8192, 32 << 20)


def long_head(address: Address) -> str:
    """Send endless header lines."""
    return _stream_of(address, b"GET / HTTP/1.1\r\n", b"x-a: b\r\n" * 8192, 16 << 20)


def pipeline(address: Address) -> str:
    """Send requests without reading any answers."""
    body = b'{"prompt": "ROMEO:", "max_tokens": 1}'
    return _stream_of(address, b"", request("/v1/completions", body) * 200, 16 << 20)


_UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAI")
_HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: swell\r\n\r\n"


def upgrade_of_a_body(address: Address) -> str:
    """Hide a request in a body behind a protocol upgrade."""
    return _hidden(address, request("/nowhere", _HIDDEN, *_UPGRADE))


def upgrade_of_chunks(address: Address) -> str:
    """Hide a request in a chunk behind a protocol upgrade."""
    head = _head("/nowhere", "Transfer-Encoding: chunked", *_UPGRADE)
    return _hidden(address, b"%s%x\r\n%s\r\n0\r\n\r\n" % (head, len(_HIDDEN), _HIDDEN))


def upgrade_without_a_body(address: Address) -> str:
    """Send data of the other protocol after a protocol upgrade."""
    head = _head("/nowhere", *_UPGRADE).replace(b"POST", b"GET")
    return _hidden(address, head, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def upgrade_pipeline(address: Address) -> str:
    """Send protocol upgrades without reading any answers."""
    body = b'{"prompt": "ROMEO:", "max_tokens": 1}'
    wire = request("/v1/completions", body, *_UPGRADE)
    return _stream_of(address, b"", wire * 200, 16 << 20)


def _hidden(address: Address, wire: bytes, after: bytes = b"") -> str:
    """Send a request that hides another, then one more; report the number of answers."""
    last = b"GET /health HTTP/1.1\r\nHost: swell\r\nConnection: close\r\n\r\n"
    data = b""
    with contextlib.suppress(OSError), socket.create_connection(address, 30) as connection:
        connection.sendall(wire + (after or last))
        while piece := connection.recv(1 << 16):
            data += piece
    answers = data.count(b"HTTP/1.1 ")
    if b"101 Switching" in data or answers > 2 or (not after and answers != 2):
        return f"{FOOLED} {answers} answers"
    return f"{answers} answers"


def unfinished_uploads(address: Address, count: int = 16, size: int = 60 << 20) -> str:
    """Declare large bodies, send all but the end of each, and wait."""
    ends: Counter[str] = Counter()
    piece = b"a" * (1 << 20)
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(address, 5))
            connection.settimeout(0.5)
            connections.append(connection)
            with contextlib.suppress(OSError):
                head = _head("/v1/completions", "Transfer-Encoding: chunked")
                connection.sendall(head + f"{size:x}\r\n".encode())
        for connection in connections:
            sent = 0
            try:
                while sent < size - len(piece):
                    connection.sendall(piece)
                    sent += len(piece)
            except TimeoutError:
                ends["not read on"] += 1
            except OSError:
                ends["cut off"] += 1
            else:
                ends["taken"] += 1
        time.sleep(0.2)  # accepted data is buffered now
    return _summary(ends)


def abandoned_uploads(address: Address) -> str:
    """Disconnect in the middle of bodies."""
    for size in range(200):
        with contextlib.suppress(OSError), socket.create_connection(address, 5) as connection:
            wire = request("/v1/chat/completions", b'{"messages": [' + b"0," * 5000 + b"0]}")
            connection.sendall(wire[: size * 50])
    return "200 begun"


def answered_early(address: Address, count: int = 200) -> str:
    """Have unfinished bodies refused early, then drip bytes."""
    first = _head("/nowhere", "Content-Length: 100000") + b"{"
    return _held_open(address, [first] * count, b" ")


def slow_heads(address: Address, count: int = 200) -> str:
    """Send heads byte by byte."""
    return _held_open(address, [b"GET / HTTP/1.1\r\nx: "] * count, b"y")


def idle_connections(address: Address, count: int = 1100) -> str:
    """Open connections and send nothing."""
    with _connections(address, count) as connections:
        status, _ = exchange(address, b"GET /health HTTP/1.1\r\nHost: swell\r\n\r\n", 10)
        return f"{len(connections)} opened, beside them {status or 'nothing'}"


def _held_open(address: Address, firsts: list[bytes], drip: bytes) -> str:
    """Open a connection per `firsts` entry, drip every half second; count those that stay open."""
    with _connections(address, len(firsts)) as connections:
        for connection, first in zip(connections, firsts, strict=False):
            with contextlib.suppress(OSError):
                connection.sendall(first)
        started_at, opened = time.monotonic(), len(connections)
        while connections and time.monotonic() - started_at < _PATIENCE:
            time.sleep(0.5)
            connections = [each for each in connections if _still_open(each, drip)]
        seconds = time.monotonic() - started_at
        return f"{opened} opened, {len(connections)} open after {seconds:.1f} s"


def _still_open(connection: socket.socket, drip: bytes) -> bool:
    try:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1 << 16):
                return False
        connection.send(drip)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _connections(address: Address, count: int) -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection(address, 5))
        yield opened
    finally:
        for connection in opened:
            connection.close()


def slow_readers(address: Address, count: int = 16) -> str:
    """Request long streams with large chunks, and do not read them."""
    body = (
        b'{"prompt": "ROMEO:", "max_tokens": 400, "stream": true, "ignore_eos": true, '
        b'"logprobs": 5, "n": 4}'
    )
    with _connections(address, count) as connections:
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                connection.sendall(request("/v1/completions", body))
        wait_for_first_bytes(connections)
        time.sleep(2)  # the engines' output accumulates meanwhile
    return f"{count} streams of four choices"


def wait_for_first_bytes(connections: list[socket.socket]) -> None:
    """Wait until data has arrived on each connection, at most some seconds."""
    deadline, waiting = time.monotonic() + _PATIENCE, len(connections)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while waiting and time.monotonic() < deadline:
            for key, _ in selector.select(0.2):
                selector.unregister(key.fileobj)
                waiting -= 1


def hang_ups(address: Address) -> str:
    """Request long streams and disconnect immediately, many times."""
    body = b'{"prompt": "ROMEO:", "max_tokens": 400, "stream": true, "ignore_eos": true}'
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(address, 5) as connection:
            connection.sendall(request("/v1/completions", body))
    return "300 begun"


def _summary(ends: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in ends.items())


ATTACKS: dict[str, tuple[Attack, ...]] = {
    "connections": (
        trailers, one_trailer, chunk_extensions, tiny_chunks, long_head, pipeline,
        unfinished_uploads, abandoned_uploads, answered_early, slow_heads, idle_connections,
        slow_readers, hang_ups,
    ),
    "upgrades": (
        upgrade_of_a_body, upgrade_of_chunks, upgrade_without_a_body, upgrade_pipeline,
    ),
}  # fmt: skip
"""By kind: those that send and read in hostile ways, and those that offer another protocol."""
