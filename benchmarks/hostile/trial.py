"""Runs hostile clients against a server and measures the cost of each to it and others."""

import contextlib
import functools
import itertools
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.hostile.bodies import Body, bodies
from benchmarks.hostile.bystanders import Bystanders, slowdown
from benchmarks.hostile.connections import (
    ATTACKS,
    FOOLED,
    address_of,
    exchange,
    request,
)
from benchmarks.hostile.disks import full_disk
from benchmarks.hostile.kept import stored_requests
from benchmarks.hostile.operations import (
    ADMIN_OPERATIONS,
    OPERATIONS,
    Operation,
    keep_something,
    named,
)
from benchmarks.hostile.queues import waits
from benchmarks.hostile.requests import REQUESTS, long_requests
from benchmarks.hostile.unread import leave_unread, unread_answers
from benchmarks.hostile.watch import Cost, Watch
from benchmarks.running_stack import RunningStack
from server.limits import MAX_UNSENT_OF_ONE

MEMORY_BOUND = 64 << 20
"""Maximum bytes by which one request may grow a front end, beyond its own body."""
STALL_BOUND = 0.1
"""Maximum seconds for which one request may block a front end's event loop."""
GAP_BOUND = 1.5
"""Maximum ratio of the median token gaps of other streams during and before an attack."""
NUM_BYSTANDERS = 4
ATTEMPTS = 8
"""Attempts for an attack that seems to block the loop: other load only ever adds to a stall, while
a stall caused by the attack recurs every time."""
MORE_ATTEMPTS = 120.0
"""Total seconds that a trial spends on further attempts while stalls recur."""
_CALM_SECONDS = 4.0
_GAP_ROUNDS, _GAP_SECONDS = 3, 1.5
_ANSWERS = {200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 422, 429, 431, 503}

ADMIN_KEY = "of-the-operator"

_PAGES = ("/", "/docs", "/openapi.json", "/metrics/engine/0")
"""Paths fetched without a body besides those that the OpenAPI document has."""


_OBEYED = {
    ("/admin/scale", "data_parallel_size: 1024"),
    ("/scale_elastic_ep", "new_data_parallel_size: 1024"),
}
"""Valid bodies that would make a server start processes without end."""

T = TypeVar("T")
Part = tuple[int, int]
"""(K, N) for every N-th attack, starting with the K-th: all attacks can be sent in N runs."""
ALL = (1, 1)


@dataclass
class Row:
    """Result of one attack."""

    name: str
    outcome: str
    started_at: float
    ended_at: float
    size: int = 0
    """Bytes of the request's body; 0 if there is no single one."""
    cost: Cost = field(default_factory=Cost)
    wrong: list[str] = field(default_factory=list)
    """Exceeded bounds, and unexpected answers."""
    gap_ratio: float | None = None
    """Ratio of other streams' median token gaps to those without attacks; None if too short."""


class Trial:
    """A server with one front end, bystander streams, and a row per attack.

    Args:
        flags: additional flags of the server.
        key: API key of the server and the bystanders; attacks lack it unless `with_key`.
        bystanders: number of streams during the attacks; with 0, gaps are not measured.
    """

    def __init__(
        self,
        *flags: str,
        key: str | None = None,
        with_key: bool = True,
        bystanders: int = NUM_BYSTANDERS,
    ) -> None:
        self.rows: list[Row] = []
        self.leftovers: list[str] = []
        """Resources still in use some time after the last attack."""
        self._more_attempts = MORE_ATTEMPTS
        self._key = key
        self._pools = "pooling" in flags
        self._num_bystanders = bystanders
        self._headers = [f"Authorization: Bearer {key}"] if key is not None and with_key else []
        keys = () if key is None else ("--api-key", key)
        self._stack = RunningStack(
            "--api-server-count", "1", "--data-parallel-size", "1", "--log-level", "error",
            "--receive-timeout", "2", "--keep-alive-timeout", "2", "--send-timeout", "2",
            "--admin-key", ADMIN_KEY, *keys, *flags,
        )  # fmt: skip

    def __enter__(self) -> "Trial":
        self._stack.__enter__()
        self._address = address_of(self._stack.url)
        self._processes = self._stack.processes()
        self._opened = contextlib.ExitStack()
        self._watch = self._opened.enter_context(
            Watch(self._stack.url, self._processes["api 0"].pid)
        )
        self._store_objects()  # warm up
        self._bystanders: Bystanders | None = None
        if self._num_bystanders:
            self._bystanders = self._opened.enter_context(
                Bystanders(self._stack.url, self._num_bystanders, self._key)
            )
            self._calm_from = time.monotonic()
            time.sleep(_CALM_SECONDS)  # baseline for the gaps
            self._calm_until = time.monotonic()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)
        try:
            self.leftovers = self._find_leftovers()
        finally:
            self._stack.__exit__(*error)
        self._judge_gaps()

    # -- attacks ---------------------------------------------------------------------------------

    def fields(self, part: Part = ALL, paths: Iterable[str] = tuple(OPERATIONS)) -> Iterator[str]:
        """Send the extreme values of the fields of these paths; yield the progress after each."""
        stored_ids = self._store_objects()
        operations = [OPERATIONS[path] for path in paths]
        fitting = [each for each in operations if each.pools or not self._pools]
        return self._worst_values(fitting, stored_ids, part)

    def admin(self, part: Part = ALL) -> Iterator[str]:
        """Send extreme values to the operator's endpoints, without the admin key and with it."""
        operations = [*ADMIN_OPERATIONS.values()]
        strangers = self._headers
        yield from self._worst_values(operations, {}, part)
        self._headers = [f"Authorization: Bearer {ADMIN_KEY}"]
        try:
            yield from self._worst_values(operations, {}, part)
        finally:
            self._headers = strangers

    def _worst_values(
        self, operations: Sequence[Operation], stored_ids: dict[str, str], part: Part
    ) -> Iterator[str]:
        document = json.loads(self._get("/openapi.json"))
        found = list(piece(field_attacks(operations, document, stored_ids), part))
        number = 0
        for path, group in itertools.groupby(found, key=lambda attack: attack[0]):
            worst: Row | None = None
            for _, body in group:
                row = self._request(f"{path} {body.name}", path, body.text.encode())
                if row.wrong:
                    self.rows.append(row)
                if worst is None or _weight(row.cost) > _weight(worst.cost):
                    worst = row
                number += 1
                yield f"{path} ({number:,} of {len(found):,})"
            if worst is not None and not worst.wrong:
                self.rows.append(worst)

    def _store_objects(self) -> dict[str, str]:
        """Send every valid body once; return the ids of stored objects."""
        stored_ids = {} if self._pools else keep_something(self._ask)
        for operation in OPERATIONS.values():
            if operation.pools or not self._pools:
                for right in operation.rights:
                    wire = json.dumps(named(right, stored_ids)).encode()
                    exchange(
                        self._address, self._as_owner(operation.path.format(**stored_ids), wire)
                    )
        return stored_ids

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Set up server state before an attack that uses it."""
        wire = self._as_owner(path, json.dumps(body).encode())
        status, answer = exchange(self._address, wire)
        assert status == 200, f"{path}: {answer.decode()}"
        found: dict[str, Any] = json.loads(answer)
        return found

    def _as_owner(self, path: str, body: bytes) -> bytes:
        headers = [f"Authorization: Bearer {self._key}"] if self._key is not None else []
        return request(path, body, *headers)

    def requests(self, kind: str, part: Part = ALL) -> Iterator[str]:
        """Send the requests of a kind of `REQUESTS`."""
        for each in piece(REQUESTS[kind](), part):
            self.rows.append(self._request(each.name, each.path, each.body))
            yield each.name

    def kept(self) -> Iterator[str]:
        """Continue from, and list, the maximum that the server stores."""
        for each in stored_requests(self._ask):
            if each.body is None:
                self._ask_for(each.name, each.path)
            else:
                body = json.dumps(each.body).encode()
                self.rows.append(self._request(each.name, each.path, body))
            yield each.name

    def shown(self) -> Iterator[str]:
        """Fetch all paths without parameters that answer GET requests."""
        documented = json.loads(self._get("/openapi.json"))["paths"].items()
        paths = [path for path, ways in documented if "get" in ways and "{" not in path]
        for path in (*_PAGES, *paths):
            self._ask_for(f"GET {path}", path)
            yield path

    def _ask_for(self, name: str, path: str) -> None:
        lines = [f"GET {path} HTTP/1.1", "Host: swell", *self._headers, "", ""]
        self.rows.append(self._exchange(name, 0, "\r\n".join(lines).encode()))

    def gaps(self) -> Iterator[str]:
        """Measure the effect of long requests on other streams, alternating with and without
        them."""
        for name, body in long_requests().items():
            started_at = time.monotonic()
            ratio = slowdown(self._stack.url, body, rounds=_GAP_ROUNDS, seconds=_GAP_SECONDS)
            row = Row(name, "", started_at, time.monotonic(), gap_ratio=ratio)
            if ratio > GAP_BOUND:
                row.wrong.append(f"others' gaps {ratio:.2f} times as long")
            self.rows.append(row)
            yield name

    def raw(self, kind: str) -> Iterator[str]:
        """Run the clients of a kind of `ATTACKS`."""
        for attack in ATTACKS[kind]:
            name = attack.__name__.replace("_", " ")
            row = self._measured(name, 0, functools.partial(attack, self._address))
            if row.outcome.startswith(FOOLED):
                row.wrong.append(row.outcome)
            self.rows.append(row)
            yield name

    def unread(self, part: Part = ALL) -> Iterator[str]:
        """Request large answers on many connections, and read none."""
        for name, requests in piece(unread_answers(self._ask, self._headers), part):
            leave = functools.partial(leave_unread, self._address, requests)
            # a front end buffers this much unread data per tenant
            self.rows.append(self._measured(name, 0, leave, held_bytes=MAX_UNSENT_OF_ONE))
            yield name

    def disks(self) -> Iterator[str]:
        """Fill the disk of a separate server; requires root."""
        name, started_at = "full disk", time.monotonic()
        outcome, wrong = full_disk()
        self.rows.append(Row(name, outcome, started_at, time.monotonic(), wrong=wrong))
        yield name

    def queues(self) -> Iterator[str]:
        """In a separate server, fill each queue before the engines for one of two tenants."""
        started_at = time.monotonic()
        for name, outcome, wrong in waits():
            self.rows.append(Row(name, outcome, started_at, time.monotonic(), wrong=wrong))
            yield name

    def _request(self, name: str, path: str, body: bytes) -> Row:
        return self._exchange(name, len(body), request(path, body, *self._headers))

    def _exchange(self, name: str, size: int, wire: bytes) -> Row:
        def send() -> str:
            status, answer = exchange(self._address, wire)
            return f"{status}, {len(answer)} bytes"

        row = self._measured(name, size, send)
        if int(row.outcome.partition(",")[0]) not in _ANSWERS:
            row.wrong.append(f"answered {row.outcome}")
        return row

    def _measured(
        self, name: str, size: int, attack: Callable[[], str], held_bytes: int = 0
    ) -> Row:
        costs: list[Cost] = []
        started_at = time.monotonic()
        while not costs or costs[-1].stall > STALL_BOUND:
            if len(costs) >= ATTEMPTS and self._more_attempts <= 0:
                break
            attempted = time.monotonic()
            self._watch.begin()
            outcome = attack()
            costs.append(self._watch.cost())
            if len(costs) > ATTEMPTS:
                self._more_attempts -= time.monotonic() - attempted
        cost = Cost(
            max(each.memory for each in costs),
            min(each.stall for each in costs),
            min(each.silence for each in costs),
        )
        row = Row(name, outcome, started_at, time.monotonic(), size, cost)
        if row.cost.memory > MEMORY_BOUND + size + held_bytes:
            row.wrong.append(f"grew by {row.cost.memory >> 20} MB")
        if row.cost.stall > STALL_BOUND:
            row.wrong.append(f"kept the loop for {row.cost.stall * 1e3:.0f} ms")
        return row

    # -- afterwards ------------------------------------------------------------------------------

    def _judge_gaps(self) -> None:
        if self._bystanders is None:
            return
        calm = self._bystanders.median_between(self._calm_from, self._calm_until)
        for row in [each for each in self.rows if each.gap_ratio is None]:
            gap = self._bystanders.median_between(row.started_at, row.ended_at)
            if calm is not None and gap is not None:
                row.gap_ratio = gap / calm

    def _find_leftovers(self) -> list[str]:
        """Return resources that are in use although there are no requests."""
        deadline = time.monotonic() + 90
        while (busy := self._busy()) and time.monotonic() < deadline:
            time.sleep(0.1)
        now = self._stack.processes()
        if now != self._processes:
            busy.append(f"processes were {self._processes}, are {now}")
        lines = self._stack.lines
        first = next((at for at, line in enumerate(lines) if "Traceback" in line), None)
        if first is not None:
            busy.append("\n".join(["in the log:", *lines[max(0, first - 1) : first + 40]]))
        return busy

    def _busy(self) -> list[str]:
        names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
        text = self._get("/metrics")
        found = re.findall(rf"^(swell_(?:{names})\{{[^}}]*\}}) (\S+)$", text, re.M)
        return [f"{name} {value}" for name, value in found if float(value) != 0]

    def _get(self, path: str) -> str:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(self._stack.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=90) as answer:
            text: str = answer.read().decode()
        return text


def field_attacks(
    operations: Iterable[Operation], document: dict[str, Any], stored_ids: dict[str, str]
) -> Iterator[tuple[str, Body]]:
    """Yield each body, with its path."""
    for operation in operations:
        path = operation.path.format(**stored_ids)
        content = document["paths"][operation.path]["post"]["requestBody"]["content"]
        rights = [named(right, stored_ids) for right in operation.rights]
        for body in bodies(content["application/json"]["schema"], document, rights):
            if (path, body.name) not in _OBEYED:
                yield path, body


def piece(found: Iterable[T], part: Part) -> Iterator[T]:
    """Yield every N-th element, starting with the K-th."""
    which, number = part
    return itertools.islice(found, which - 1, None, number)


def _weight(cost: Cost) -> float:
    return max(cost.memory / MEMORY_BOUND, cost.stall / STALL_BOUND)
