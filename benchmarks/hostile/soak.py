"""Random hostile requests with four keys, while eight honest streams run, on two engines.

    python -m benchmarks.hostile.soak --minutes 10

The streams are first measured without attacks. Exits with status 1 if one was incomplete, if the
99th percentile of token gaps more than doubles during the attack, or if a process was replaced.
Arguments after `--` are flags of the server.

Real attackers run on their own machines; here they are one low-priority process. On two cores it
gets a fiftieth of one, so that the gaps are the server's.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.hostile.bystanders import Bystanders
from benchmarks.hostile.connections import ATTACKS, Address, address_of, exchange, request
from benchmarks.hostile.operations import OPERATIONS, keep_something
from benchmarks.hostile.requests import REQUESTS, long_requests
from benchmarks.hostile.trial import field_attacks
from benchmarks.hostile.unread import leave_unread
from benchmarks.running_stack import RunningStack

GAP_BOUND = 2.0
"""Maximum ratio of the 99th percentiles of honest gaps."""
NUM_STREAMS, NUM_KEYS, AT_ONCE = 8, 4, 2
_HONEST = "honest-key"
_SETTLING = 2.0
_NICE = 10
"""Niceness of the attackers."""

Send = Callable[[Address, str], str]
"""Sends one hostile request with an authorization header; returns the outcome."""


def _posts(found: Sequence[tuple[str, bytes]]) -> list[Send]:
    def of(path: str, body: bytes) -> Send:
        return lambda address, key: str(exchange(address, request(path, body, key), 60.0)[0])

    return [of(path, body) for path, body in found]


def hostile_requests(address: Address, document: dict[str, Any]) -> dict[str, list[Send]]:
    """Return all requests of the other attack kinds, by kind."""

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        key = f"Authorization: Bearer {_HONEST}"
        found: dict[str, Any] = json.loads(
            exchange(address, request(path, json.dumps(body).encode(), key))[1]
        )
        return found

    fields = field_attacks(
        [each for each in OPERATIONS.values() if not each.pools], document, keep_something(ask)
    )
    longs = [("/v1/completions", json.dumps(body).encode()) for body in long_requests().values()]

    def unread(address: Address, key: str) -> str:
        head = f"GET /openapi.json HTTP/1.1\r\nHost: swell\r\n{key}\r\n\r\n".encode()
        return leave_unread(address, [head] * 50)

    def raw(attack: Callable[[Address], str]) -> Send:
        return lambda address, _: attack(address)

    return {
        "fields": [
            lambda address, key, path=path, body=body: str(  # type: ignore[misc]
                exchange(address, request(path, body.text.encode(), key), 60.0)[0]
            )
            for path, body in fields
        ],
        **{
            kind: _posts([(each.path, each.body) for each in requests()])
            for kind, requests in REQUESTS.items()
            if kind != "inputs"
        },
        "long": _posts(longs),
        "connections": [raw(attack) for attacks in ATTACKS.values() for attack in attacks],
        "unread": [unread],
    }


def _attack(
    address: Address,
    key: str,
    kinds: dict[str, list[Send]],
    seed: int,
    over: Event,
    sent: Counter[str],
) -> None:
    chance = random.Random(seed)
    while not over.is_set():
        kind = chance.choice(list(kinds))
        with contextlib.suppress(OSError):
            chance.choice(kinds[kind])(address, f"Authorization: Bearer {key}")
        sent[kind] += 1


def _attack_together(
    address: Address,
    keys: Sequence[str],
    kinds: dict[str, list[Send]],
    seed: int,
    over: Event,
    receiver: "Connection[Counter[str], Any]",
) -> None:
    """Attack with each key until `over` is set, in this process, at low priority."""
    os.setsid()  # Linux may divide CPU time between sessions before it considers niceness
    os.nice(_NICE)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(_NICE))
    sent: Counter[str] = Counter()
    threads = [
        threading.Thread(target=_attack, args=(address, key, kinds, seed + at, over, sent))
        for at, key in enumerate(keys)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receiver.send(sent)


def _p99(gaps: list[float]) -> float:
    return quantiles(gaps, n=100)[98] if len(gaps) > 1 else float("inf")


def _unexpected(stack: RunningStack, before: dict[str, int]) -> list[str]:
    """Return replaced processes of the stack, and tracebacks in its log."""
    now = {name: process.pid for name, process in stack.processes().items() if name in before}
    replaced = [name for name in before if now.get(name) != before[name]]
    found = [f"replaced: {', '.join(replaced)}"] if replaced else []
    return found + [line for line in stack.lines if "Traceback" in line]


def soak(minutes: float, peace: float, seed: int, flags: Sequence[str]) -> list[str]:
    """Run the soak; print the results, and return any problems."""
    kinds: dict[str, list[Send]] = {}
    with tempfile.TemporaryDirectory() as directory:
        keys = [f"hostile-key-{number}" for number in range(NUM_KEYS)]
        file = Path(directory) / "keys"
        lines = [f"hostile-{number}: {key}" for number, key in enumerate(keys)]
        file.write_text("\n".join([f"honest: {_HONEST}", *lines]))
        file.chmod(0o600)
        with RunningStack(
            "--api-server-count", "2", "--data-parallel-size", "2", "--log-level", "warning",
            "--api-key-file", str(file), *flags, timeout=300.0,
        ) as stack:  # fmt: skip
            address = address_of(stack.url)
            schema_request = urllib.request.Request(
                f"{stack.url}/openapi.json", headers={"Authorization": f"Bearer {_HONEST}"}
            )
            with urllib.request.urlopen(schema_request, timeout=20) as answer:
                kinds = hostile_requests(address, json.load(answer))
            before = {name: process.pid for name, process in stack.processes().items()}
            forks = multiprocessing.get_context("fork")
            over, (receiver, sender) = forks.Event(), forks.Pipe(duplex=False)
            attackers = forks.Process(
                target=_attack_together,
                args=(address, keys * AT_ONCE, kinds, seed, over, sender),
            )
            with Bystanders(stack.url, NUM_STREAMS, _HONEST) as honest:
                time.sleep(_SETTLING)
                calm_at = time.monotonic()
                time.sleep(peace)
                attack_at = time.monotonic()
                attackers.start()
                time.sleep(minutes * 60)
                ended = time.monotonic()
                over.set()
                sent = receiver.recv()
                attackers.join()
            wrong = _unexpected(stack, before)
    calm_gaps, attack_gaps = honest.between(calm_at, attack_at), honest.between(attack_at, ended)
    ratio = _p99(attack_gaps) / _p99(calm_gaps)
    print(f"hostile requests: {dict(sent)}, {sent.total()} in all")
    print(f"honest streams: {honest.complete} complete, {honest.broken} not")
    print(
        f"p99 gap: {_p99(calm_gaps) * 1e3:.1f} ms of {len(calm_gaps)} in peace, "
        f"{_p99(attack_gaps) * 1e3:.1f} ms of {len(attack_gaps)} beside them, {ratio:.2f} times"
    )
    if honest.broken or not honest.complete:
        wrong.append(f"{honest.broken} honest streams were not complete")
    if not ratio <= GAP_BOUND:
        wrong.append(f"the p99 gap is more than {GAP_BOUND} times that of peace")
    for each in wrong:
        print(f"wrong: {each}")
    return wrong


def main() -> None:
    """Parse the arguments and run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peace", type=float, default=60.0, help="seconds without attacks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    arguments = parser.parse_args()
    sys.exit(bool(soak(arguments.minutes, arguments.peace, arguments.seed, arguments.server)))


if __name__ == "__main__":
    main()
