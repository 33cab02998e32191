"""Throughput of an engine beside sentence-transformers, in turn, on the same texts and model.

    python -m benchmarks.embeddings MODEL_DIRECTORY [-- FLAGS OF THE SERVER]

Both get all texts at once: `SentenceTransformer.encode` with its batch size, the server as requests
of as many inputs, several at a time. Needs `pip install sentence-transformers`.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
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


async def ask(url: str, texts: list[str], inputs: int, at_once: int) -> float:
    """Send all texts; return the seconds that the last answer took."""
    waiting = [texts[first : first + inputs] for first in range(0, len(texts), inputs)]
    async with httpx.AsyncClient(timeout=600) as client:

        async def work() -> None:
            while waiting:
                body = {
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


def processor_seconds(stack: RunningStack) -> float:
    """Return the processor time of all processes of a stack so far."""
    times = [each.cpu_times() for each in stack.processes().values()]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--words", type=int, nargs="+", default=[3, 8, 8, 20, 20, 50, 120])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=32, help="of a request")
    parser.add_argument("--at-once", type=int, default=4, help="requests")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, flags = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    texts = sample(arguments.texts, arguments.words)
    library = SentenceTransformer(arguments.model, device="cpu")
    turns: dict[str, list[Turn]] = {"sentence-transformers": [], "swell": []}
    with RunningStack(arguments.model, *flags) as stack:
        for turn in range(arguments.rounds + 1):
            began = time.perf_counter(), time.process_time()
            library.encode(texts, batch_size=arguments.batch_size)
            one = Turn(time.perf_counter() - began[0], time.process_time() - began[1])
            before = processor_seconds(stack)
            seconds = asyncio.run(ask(stack.url, texts, arguments.inputs, arguments.at_once))
            other = Turn(seconds, processor_seconds(stack) - before)
            if turn:  # the first warms both up
                turns["sentence-transformers"].append(one)
                turns["swell"].append(other)
    for name, each in turns.items():
        seconds, processor = (statistics.median(column) for column in zip(*each, strict=True))
        rate = arguments.texts / seconds
        print(f"{name:>22}: {seconds:6.2f} s  {rate:7.1f} texts/s  {processor:6.2f} s of processor")
    for index, what in enumerate(Turn._fields):
        ratios = [one[index] / other[index] for one, other in zip(*turns.values(), strict=True)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{'ratio':>22}: {statistics.median(ratios):.2f} by {what} (rounds: {shown})")


if __name__ == "__main__":
    main()
