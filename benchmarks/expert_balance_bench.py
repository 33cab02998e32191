"""How evenly two engines share out the work of experts, before and after these are dealt out anew.

    python -m benchmarks.expert_balance_bench --redundant 2

Serves the bundled sparse model with --data-parallel-size 2 --enable-expert-parallel twice, in
float32: as it is, and with --enable-eplb. Both answer the same requests, whose prompts repeat a few
words, so that few experts have most to do. What engines say of their imbalance (the maximum over
the mean of what they computed in an interval) is read from /metrics; the answers are compared.
"""

import argparse
import asyncio
import json
import random
import re
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.running_stack import RunningStack

MODEL = "swell-shakespeare"
_WORDS = ("love", "night", "sword")
_IMBALANCE = re.compile(r'^swell_expert_imbalance\{[^}]*engine="0"[^}]*\} (\S+)$', re.MULTILINE)
_MOVED = re.compile(
    r'^swell_expert_layers_moved_total\{[^}]*engine="0"[^}]*\} (\S+)$', re.MULTILINE
)


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return requests whose prompts are of one word each."""
    draw = random.Random(3)
    return [
        {
            "model": MODEL,
            "prompt": " ".join([draw.choice(_WORDS)] * draw.randint(8, 40)) + f" {number}",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def _answer(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            text: str = json.load(response)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error}: {error.read()[:300]!r}") from error
    return text


async def answers(url: str, requests: list[dict[str, Any]], at_once: int) -> list[str]:
    """Return the texts of all requests, sent so many at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any]) -> str:
        async with room:
            return await asyncio.to_thread(_answer, url, body)

    return await asyncio.gather(*map(one, requests))


def known(url: str) -> tuple[float | None, int]:
    """Return the imbalance that an engine reports, if it does, and how many layers have moved."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    imbalance, moved = _IMBALANCE.search(text), _MOVED.search(text)
    return float(imbalance[1]) if imbalance else None, int(float(moved[1])) if moved else 0


def serve(options: argparse.Namespace, *flags: str) -> tuple[list[str], list[tuple[float, int]]]:
    """Return the answers of the last round, and what was known after each round."""
    requests = bodies(options.requests, options.tokens)
    seen: list[tuple[float, int]] = []
    together = ("--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")
    with RunningStack(*together, "--log-level", "warning", *flags) as stack:
        for _ in range(options.rounds):
            texts = asyncio.run(answers(stack.url, requests, options.at_once))
            imbalance, moved = known(stack.url)
            if imbalance is not None:
                seen.append((imbalance, moved))
    return texts, seen


def main() -> None:
    """Serve, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--redundant", type=int, default=2)
    parser.add_argument("--interval", type=int, default=200)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    plain, _ = serve(options)
    balanced, seen = serve(
        options,
        "--enable-eplb",
        *("--num-redundant-experts", str(options.redundant)),
        *("--eplb-step-interval", str(options.interval)),
    )
    table = Table("after round", "maximum over mean", "layers moved so far")
    for number, (imbalance, moved) in enumerate(seen, 1):
        table.add_row(str(number), f"{imbalance:.3f}", str(moved))
    console = Console()
    console.print(table)
    console.print(f"answers alike: {sum(map(str.__eq__, plain, balanced))} of {len(plain)}")


if __name__ == "__main__":
    main()
