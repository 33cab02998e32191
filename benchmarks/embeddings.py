"""Throughput of an engine beside sentence-transformers, in turn, on the same texts and model.

    python -m benchmarks.embeddings MODEL_DIRECTORY [--peer URL --peer-pid PID] [-- FLAGS]

Both get all texts at once: `SentenceTransformer.encode` with its batch size, the server as requests
of as many inputs, several at a time. A peer is another server of OpenAI's embeddings, which is
asked like ours, in turn with it; flags are those of our server. Needs `pip install
sentence-transformers`.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from sentence_transformers import SentenceTransformer

from benchmarks.running_stack import RunningStack

DOCS = Path(__file__).parent.parent / "docs"


def sample(count: int, lengths: list[int]) -> list[str]:
    """Return texts of so many words, from the project's own pages."""
    words = " ".join(page.read_text() for page in sorted(DOCS.glob("*.md"))).split()
    draw = random.Random(1)
    chosen = draw.choices(lengths, k=count)
    starts = [draw.randrange(len(words) - length) for length in chosen]
    return [
        " ".join(words[start : start + length])
        for start, length in zip(starts, chosen, strict=True)
    ]


async def ask(url: str, model: str, texts: list[str], inputs: int, at_once: int) -> float:
    """Send all texts; return the seconds that the last answer took."""
    waiting = [texts[first : first + inputs] for first in range(0, len(texts), inputs)]
    async with httpx.AsyncClient(timeout=600) as client:

        async def work() -> None:
            while waiting:
                body = {
                    "model": model,
                    "input": waiting.pop(),
                    "encoding_format": "base64",
                    "truncate_prompt_tokens": -1,
                }
                (await client.post(f"{url}/v1/embeddings", json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(at_once)))
        return time.perf_counter() - began


class Turn(NamedTuple):
    """What one round took."""

    seconds: float
    processor_seconds: float
    """Of all processes; says more than the clock where others compute too."""


def processor_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time of all these processes so far."""
    times = [each.cpu_times() for each in processes]
    return sum(each.user + each.system for each in times)


class Served(NamedTuple):
    """A server that is asked."""

    url: str
    model: str
    """What it calls the model."""
    processes: list[psutil.Process]

    @classmethod
    def at(cls, url: str, processes: Iterable[psutil.Process]) -> "Served":
        """Ask it for the model's name."""
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        return cls(url, model, list(processes))

    def turn(self, texts: list[str], inputs: int, at_once: int) -> Turn:
        """Send all texts."""
        before = processor_seconds(self.processes)
        seconds = asyncio.run(ask(self.url, self.model, texts, inputs, at_once))
        return Turn(seconds, processor_seconds(self.processes) - before)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--words", type=int, nargs="+", default=[3, 8, 8, 20, 20, 50, 120])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=32, help="of a request")
    parser.add_argument("--at-once", type=int, default=4, help="requests")
    parser.add_argument("--peer", help="URL of another server, without /v1")
    parser.add_argument("--peer-pid", type=int, help="its first process")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, flags = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    texts = sample(arguments.texts, arguments.words)
    library = SentenceTransformer(arguments.model, device="cpu")
    turns: dict[str, list[Turn]] = {"sentence-transformers": [], "swell": []}
    with RunningStack(arguments.model, *flags) as stack:
        servers = {"swell": Served.at(stack.url, stack.processes().values())}
        if arguments.peer is not None:
            pid = arguments.peer_pid
            peer = Served.at(arguments.peer, [] if pid is None else family(pid))
            servers["peer"], turns["peer"] = peer, []
        for turn in range(arguments.rounds + 1):
            began = time.perf_counter(), time.process_time()
            library.encode(texts, batch_size=arguments.batch_size)
            taken = {
                "sentence-transformers": Turn(
                    time.perf_counter() - began[0], time.process_time() - began[1]
                )
            }
            for name, server in servers.items():
                taken[name] = server.turn(texts, arguments.inputs, arguments.at_once)
            if turn:  # the first warms all up
                for name, one in taken.items():
                    turns[name].append(one)
    report(turns, arguments.texts)


def report(turns: dict[str, list[Turn]], texts: int) -> None:
    """Print medians, and how many times as long the others took as our server."""
    for name, each in turns.items():
        seconds, processor = (statistics.median(column) for column in zip(*each, strict=True))
        rate = texts / seconds
        print(f"{name:>22}: {seconds:6.2f} s  {rate:7.1f} texts/s  {processor:6.2f} s of processor")
    for name in turns.keys() - {"swell"}:
        for index, what in enumerate(Turn._fields):
            pairs = zip(turns[name], turns["swell"], strict=True)
            ratios = [one[index] / other[index] for one, other in pairs]
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{name:>22}: {statistics.median(ratios):.2f} times by {what} (rounds: {shown})")


if __name__ == "__main__":
    main()
