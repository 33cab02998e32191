"""Plain streams beside an attack, in a process of their own: how long their tokens take.

    python -m benchmarks.hostile.bystanders http://127.0.0.1:8000 4

Streams until it is told to stop by the end of its standard input, and then writes a JSON list of
[when, gap] in seconds of the monotonic clock, which all processes of a machine share.
"""

import asyncio
import json
import subprocess
import sys
import time
from statistics import median
from types import TracebackType
from urllib.parse import urlsplit

from benchmarks.hostile.connections import request

_BODY = json.dumps(
    {"prompt": "KING:", "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 1}
).encode()


class Bystanders:
    """Streams in a process of their own while the block runs."""

    def __init__(self, url: str, count: int, key: str | None = None) -> None:
        self._command = [sys.executable, "-m", "benchmarks.hostile.bystanders", url, str(count)]
        if key is not None:
            self._command.append(key)
        self.gaps: list[tuple[float, float]] = []
        """When a token came, and how long after the one before; known after the block."""

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
        text, _ = self._process.communicate("", timeout=30)
        self.gaps = [(when, gap) for when, gap in json.loads(text or "[]")]

    def median_between(self, began: float, ended: float) -> float | None:
        """Return the median gap of tokens that came in a time; None if there were under ten."""
        found = [gap for when, gap in self.gaps if began <= when <= ended]
        return median(found) if len(found) >= 10 else None


async def _stream(
    address: tuple[str, int], key: str | None, gaps: list[tuple[float, float]]
) -> None:
    headers = [] if key is None else [f"Authorization: Bearer {key}"]
    while True:
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(request("/v1/completions", _BODY, *headers))
            last = None
            while piece := await reader.read(1 << 16):
                now = time.monotonic()
                tokens = piece.count(b"\ndata: ") or piece.count(b"data: ")
                if last is not None and tokens:
                    gaps += [(now, (now - last) / tokens)] * tokens
                last = now if tokens else last
                if piece.endswith(b"0\r\n\r\n"):
                    break
        except OSError:
            await asyncio.sleep(0.05)
        finally:
            writer.close()


async def _main(url: str, count: int, key: str | None) -> None:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    gaps: list[tuple[float, float]] = []
    tasks = [
        asyncio.create_task(_stream((address.hostname, address.port), key, gaps))
        for _ in range(count)
    ]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    json.dump(gaps, sys.stdout)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
