"""How much longer the tokens of plain streams take while a request is computed beside them."""

import json
import threading
import time
from statistics import median
from typing import Any

from benchmarks.hostile.bystanders import Bystanders
from benchmarks.hostile.connections import address_of, exchange, request

NUM_STREAMS = 4
_SETTLING = 0.2
"""Seconds after a request begins or ends that are not counted."""


def slowdown(
    url: str, body: dict[str, Any], *, rounds: int, seconds: float, path: str = "/v1/completions"
) -> float:
    """Return the median gap of streams' tokens with a request beside them, by that without.

    Both are measured in turn, and the median of the rounds counts: what else the machine does meets
    both. It is infinite if streams stood still in most rounds. The request is sent again as long as
    its turn lasts, and cut off at the end of it.

    Args:
        url: of the server, which must do nothing else.
        body: of the request.
        rounds: turns of each kind.
        seconds: how long each lasts.
        path: where it is sent.
    """
    place = address_of(url)
    wire = request(path, json.dumps(body).encode())
    turns: list[tuple[float, float, float, float]] = []
    with Bystanders(url, NUM_STREAMS) as beside:
        time.sleep(2 * _SETTLING)
        for _ in range(rounds):
            began = time.monotonic()
            time.sleep(seconds)
            calm = time.monotonic()
            attack = _Repeated(place, wire)
            time.sleep(_SETTLING + seconds)
            ended = time.monotonic()
            attack.stop()
            time.sleep(_SETTLING)
            turns.append((began, calm, calm + _SETTLING, ended))
    ratios = []
    for began, calm, attacked, ended in turns:
        without, beside_it = (
            beside.median_between(began, calm),
            beside.median_between(attacked, ended),
        )
        if without is None or beside_it is None:  # the streams stood still
            ratios.append(float("inf"))
        else:
            ratios.append(beside_it / without)
    return median(ratios)


class _Repeated:
    """A request that is sent again whenever it was answered."""

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
