"""Token gaps of plain streams during an attack, measured in a separate process.

    python -m benchmarks.hostile.bystanders http://127.0.0.1:8000 4

Streams until its standard input ends, then writes JSON: the number of complete streams, the number
of incomplete ones, and a list of [time, gap] in seconds of the monotonic clock, which all processes
of a machine share.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks.hostile.connections import address_of, exchange, request

NUM_STREAMS = 4
_SETTLING = 0.2
"""Seconds to ignore after a request begins or ends."""
_BODY = json.dumps(
    {"prompt": "KING:", "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 1}
).encode()


class Bystanders:
    """Runs streams in a separate process during a block."""

    def __init__(self, url: str, count: int, key: str | None = None) -> None:
        self._command = [sys.executable, "-m", "benchmarks.hostile.bystanders", url, str(count)]
        if key is not None:
            self._command.append(key)
        self.gaps: list[tuple[float, float]] = []
        """Arrival time of each token and gap to the previous one; set after the block."""
        self.complete = 0
        """Number of streams that completed."""
        self.broken = 0
        """Number of streams that broke off or were refused."""

    def __enter__(self) -> "Bystanders":
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        text, _ = self._process.communicate("", timeout=90)
        self.complete, self.broken, gaps = json.loads(text or "[0, 0, []]")
        self.gaps = [(when, gap) for when, gap in gaps]

    def between(self, start: float, end: float) -> list[float]:
        """Return the gaps of tokens that arrived in an interval."""
        return [gap for when, gap in self.gaps if start <= when <= end]

    def median_between(self, start: float, end: float) -> float | None:
        """Return the median gap of tokens in an interval; None if there are under ten."""
        found = self.between(start, end)
        return median(found) if len(found) >= 10 else None


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


# -- the measuring process -------------------------------------------------------------------------


async def _stream(
    address: tuple[str, int],
    key: str | None,
    gaps: list[tuple[float, float]],
    ended: Counter[bool],
) -> None:
    headers = [] if key is None else [f"Authorization: Bearer {key}"]
    while True:
        tail = b""
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError:
            ended[False] += 1
            await asyncio.sleep(0.05)
            continue
        try:
            writer.write(request("/v1/completions", _BODY, *headers))
            last = None
            while piece := await reader.read(1 << 16):
                now = time.monotonic()
                tokens = piece.count(b"\ndata: ") or piece.count(b"data: ")
                if last is not None and tokens:
                    gaps += [(now, (now - last) / tokens)] * tokens
                last = now if tokens else last
                tail = (tail + piece)[-64:]
                if tail.endswith(b"0\r\n\r\n"):
                    break
            ended[b"data: [DONE]" in tail] += 1
        except OSError:
            ended[False] += 1
            await asyncio.sleep(0.05)
        finally:
            writer.close()


async def _main(url: str, count: int, key: str | None) -> None:
    gaps: list[tuple[float, float]] = []
    ended: Counter[bool] = Counter()
    tasks = [asyncio.create_task(_stream(address_of(url), key, gaps, ended)) for _ in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    json.dump((ended[True], ended[False], gaps), sys.stdout)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
