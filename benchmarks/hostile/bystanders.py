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
import time
from collections import Counter
from statistics import median
from types import TracebackType

from benchmarks.hostile.connections import address_of, request

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
