"""Slowdown of plain streams' tokens while another request is computed."""

import json
import threading
import time
from statistics import median
from typing import Any

from benchmarks.hostile.bystanders import Bystanders
from benchmarks.hostile.connections import address_of, exchange, request

NUM_STREAMS = 4
_SETTLING = 0.2
"""Seconds to ignore after a request begins or ends."""


def slowdown(
    url: str, body: dict[str, Any], *, rounds: int, seconds: float, path: str = "/v1/completions"
) -> float:
    """Return the ratio of streams' median token gaps with and without another request.

    Both are measured alternately, and the median over the rounds counts, since other load affects
    both. It is infinite if streams stalled in most rounds. The request is repeated during its
    intervals, and cut off at their end.

    Args:
        url: server URL; it must be otherwise idle.
        body: request body.
        rounds: number of intervals of each kind.
        seconds: duration of each interval.
        path: request path.
    """
    address = address_of(url)
    wire = request(path, json.dumps(body).encode())
    rounds_run: list[tuple[float, float, float, float]] = []
    with Bystanders(url, NUM_STREAMS) as bystanders:
        time.sleep(2 * _SETTLING)
        for _ in range(rounds):
            started_at = time.monotonic()
            time.sleep(seconds)
            calm_at = time.monotonic()
            attack = _Repeated(address, wire)
            time.sleep(_SETTLING + seconds)
            ended = time.monotonic()
            attack.stop()
            time.sleep(_SETTLING)
            rounds_run.append((started_at, calm_at, calm_at + _SETTLING, ended))
    ratios = []
    for started_at, calm_at, attacked, ended in rounds_run:
        without, beside_it = (
            bystanders.median_between(started_at, calm_at),
            bystanders.median_between(attacked, ended),
        )
        if without is None or beside_it is None:  # the streams stalled
            ratios.append(float("inf"))
        else:
            ratios.append(beside_it / without)
    return median(ratios)


class _Repeated:
    """A request that is repeated whenever it is answered."""

    def __init__(self, address: tuple[str, int], wire: bytes) -> None:
        self._address, self._wire = address, wire
        self._over = threading.Event()
        self._refused = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            status, answer = exchange(self._address, self._wire, over=self._over)
            if status not in (0, 200):
                self._refused = f"the request was answered {status}: {answer[:200]!r}"
                return

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        assert not self._refused, self._refused
