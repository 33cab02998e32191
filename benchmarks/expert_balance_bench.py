"""How evenly two engines share the work of experts, before and after these are dealt out anew.

    python -m benchmarks.expert_balance_bench --redundant 2

Serves a copy of the bundled sparse model whose routers prefer the first half of the experts, which
one engine holds alone at first: with --data-parallel-size 2 --enable-expert-parallel in float32, as
it is and with --enable-eplb. Both answer the same requests. What engines say of their imbalance
(the maximum over the mean of what they computed in an interval) is read from /metrics whenever it
changes; the answers are compared.
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL

_WORDS = ("love", "night", "sword", "king")
_POLL = 0.1
"""Seconds between looks at the metrics; intervals are longer."""


class Look(NamedTuple):
    """What an engine knows after an interval."""

    imbalance: float
    moved: int
    """Layers that have been changed so far."""


def prefer_first_experts(source: Path, target: Path, factor: float) -> None:
    """Copy a model, the scores of whose first half of experts are multiplied."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name, router in tensors.items():
        if name.endswith("mlp.gate.weight"):
            router[: len(router) // 2] *= factor
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return requests whose prompts are one word each, many times."""
    draw = random.Random(3)
    return [
        {
            "prompt": " ".join([draw.choice(_WORDS)] * draw.randint(8, 40)) + f" {number}",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


async def answers(url: str, requests: list[dict[str, Any]], at_once: int) -> list[str]:
    """Return the texts of all requests, sent so many at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any]) -> str:
        async with room:
            return await asyncio.to_thread(_answer, url, body)

    return await asyncio.gather(*map(one, requests))


def _answer(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def look(url: str) -> Look | None:
    """Return what an engine says of the experts' load, once it knows something."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = {
        name: re.search(rf'^swell_{name}\{{[^}}]*engine="0"[^}}]*\}} (\S+)$', text, re.MULTILINE)
        for name in ("expert_imbalance", "expert_layers_moved_total")
    }
    imbalance, moved = found.values()
    if imbalance is None or moved is None:
        return None
    return Look(float(imbalance[1]), int(float(moved[1])))


class Watch:
    """Looks at the metrics beside what else is done; use as a context manager."""

    def __init__(self, url: str) -> None:
        self.seen: list[Look] = []
        """Each other imbalance that was found."""
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(_POLL):
            found = look(self._url)
            if found is not None and [each.imbalance for each in self.seen[-1:]] != [found[0]]:
                self.seen.append(found)


def serve(
    model: Path, options: argparse.Namespace, rounds: int, *flags: str
) -> tuple[list[str], list[Look]]:
    """Return the answers of all rounds, and what was seen meanwhile."""
    requests = bodies(options.requests, options.tokens)
    together = ("--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")
    # Prompts that are in the cache already are no load.
    arguments = (str(model), *together, "--no-enable-prefix-caching", "--log-level", "warning")
    texts: list[str] = []
    with RunningStack(*arguments, *flags) as stack, Watch(stack.url) as watch:
        for _ in range(rounds):
            texts += asyncio.run(answers(stack.url, requests, options.at_once))
    return texts, watch.seen


def main() -> None:
    """Serve, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--redundant", type=int, default=2)
    parser.add_argument("--interval", type=int, default=100, help="steps between two looks")
    parser.add_argument("--factor", type=float, default=1.5, help="1: the model as it is")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        prefer_first_experts(BUNDLED_MODEL, model, options.factor)
        plain, _ = serve(model, options, 1)
        eplb = ("--enable-eplb", "--num-redundant-experts", str(options.redundant))
        interval = ("--eplb-step-interval", str(options.interval))
        balanced, seen = serve(model, options, options.rounds, *eplb, *interval)
    table = Table("look", "maximum over mean", "layers moved so far")
    for number, (imbalance, moved) in enumerate(seen, 1):
        table.add_row(str(number), f"{imbalance:.3f}", str(moved))
    console = Console()
    console.print(table)
    alike = sum(map(str.__eq__, plain * options.rounds, balanced))
    console.print(f"answers alike: {alike} of {len(balanced)}")


if __name__ == "__main__":
    main()
