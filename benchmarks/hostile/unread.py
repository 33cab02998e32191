"""Large answers requested on many connections, and not read."""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks.hostile.connections import Address, wait_for_first_bytes
from benchmarks.hostile.operations import Ask
from server.limits import MAX_ADDED_ITEMS, MAX_STORED_LENGTH

_CONNECTIONS = 800
_SECONDS = 1.0
"""Seconds for which arrived data is left unread."""
_LARGE = 4_100_000
"""Characters of instructions that a response repeats, close to the body size limit."""


def unread_answers(ask: Ask, headers: list[str]) -> Iterator[tuple[str, list[bytes]]]:
    """Store large objects; yield the name and requests of each attack."""
    body = {"input": "hi", "instructions": "x" * _LARGE, "background": True}
    name = ask("/v1/responses", body)["id"]
    conversation = ask("/v1/conversations", {})["id"]
    turns = [{"role": "user", "content": "a " * 100_000}] * (MAX_ADDED_ITEMS // 2)
    for _ in range(MAX_STORED_LENGTH // 2_100_000):
        ask(f"/v1/conversations/{conversation}/items", {"items": turns})
    for what, path in (
        ("a large response", f"/v1/responses/{name}"),
        ("events of a large response", f"/v1/responses/{name}?stream=true"),
        ("a long conversation", f"/v1/conversations/{conversation}/items?limit=100"),
        ("the document", "/openapi.json"),
    ):
        head = "\r\n".join([f"GET {path} HTTP/1.1", "Host: swell", *headers, "", ""]).encode()
        yield f"{what}, not read", [head] * _CONNECTIONS


def leave_unread(address: Address, requests: list[bytes]) -> str:
    """Send each request on its own connection, read nothing, and return the statuses received."""
    with contextlib.ExitStack() as stack:
        opened = []
        for each in requests:
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection(address, 5))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(each)
                opened.append(connection)
        wait_for_first_bytes(opened)
        time.sleep(_SECONDS)
        statuses: Counter[str] = Counter()
        for connection in opened:
            connection.setblocking(False)
            status = "none"
            with contextlib.suppress(OSError):
                status = connection.recv(12)[9:].decode() or "closed"
            statuses[status] += 1
    return ", ".join(f"{number} x {status}" for status, number in statuses.most_common())
