"""Kills and stops random processes of a running stack under load and prints the tally.

Every request's answer is compared with that of an undisturbed run. A request may fail only if a
front end was killed while it was under way, because its connection may have ended there. Engines
run with --batch-invariant: else a batch of another size may round to another token.

Before and after the storm, at rest, it looks at the memory, open files and threads of every
process, at the metrics' files and series, and at the gauges, which have to be back at zero.

    python -m benchmarks.chaos --minutes 5
    python -m benchmarks.chaos --minutes 1 --kinds engine coordinator -- --executor simulated
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.running_stack import RunningStack
from benchmarks.streamed import streamed_choices, text_of

MODEL = "swell-shakespeare"
STOP_SECONDS = 8.0
"""How long a stopped process sleeps: longer than the default --engine-timeout."""


@dataclass(frozen=True)
class Task:
    """One kind of request whose answer is always the same."""

    path: str
    body: dict[str, object]
    stream: bool


@dataclass
class Tally:
    """What happened to the processes and to the requests."""

    kills: Counter[str] = field(default_factory=Counter)
    ok: int = 0
    excused: int = 0
    """Failed while a front end was killed."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    """Longest pause between two pieces of one stream, in seconds."""


WORDS = "([a-z]{2,9}[ ,]){400}"
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 400}
"""More than any request here has tokens for."""


def tasks(tokens: int) -> list[Task]:
    """Return requests of every kind: seeded, streamed or not, n, logprobs, held to a form, chat."""
    base: dict[str, object] = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
    made = []
    for i, name in enumerate(["ROMEO", "JULIET", "KING", "First Citizen", "GLOUCESTER", "HENRY"]):
        prompt = f"{name}: what say"
        for extra in (
            {"temperature": 0, "seed": i},
            {"temperature": 1.0, "seed": 100 + i},
            {"temperature": 0.8, "seed": 7, "n": 2},
            {"temperature": 0, "seed": i, "logprobs": 2},
            {"temperature": 1.0, "seed": i, "structured_outputs": {"regex": WORDS}},
            {"temperature": 1.0, "seed": i, "structured_outputs": {"json": NUMBERS}},
        ):
            body = {**base, "prompt": prompt, **extra}
            made += [Task("/v1/completions", body, stream) for stream in (False, True)]
        chat = {**base, "messages": [{"role": "user", "content": prompt}], "seed": i}
        made += [Task("/v1/chat/completions", chat, stream) for stream in (False, True)]
    return made


async def ask(client: httpx.AsyncClient, task: Task, tally: Tally) -> str:
    """Send one request and return what is the same in every run of it."""
    if not task.stream:
        answer = await client.post(task.path, json=task.body)
        answer.raise_for_status()
        body = answer.json()
        told = [
            (c.get("text") or c["message"]["content"], c["finish_reason"], tokens_of(c))
            for c in body["choices"]
        ]
        return json.dumps([told, body["usage"]["completion_tokens"]])
    pieces: dict[int, str] = {}
    last = time.monotonic()
    async for choices in streamed_choices(client, task.path, task.body):
        now = time.monotonic()
        tally.longest_gap = max(tally.longest_gap, now - last)
        last = now
        for choice in choices:
            index = choice["index"]
            pieces[index] = pieces.get(index, "") + text_of(choice)
    return json.dumps(sorted(pieces.items()))


def tokens_of(choice: dict[str, Any]) -> list[str] | None:
    """Return the tokens that a choice's log probabilities are of; their values may round."""
    logprobs = choice.get("logprobs")
    tokens: list[str] | None = logprobs and logprobs.get("tokens")
    return tokens


class Disturber:
    """Kills or stops one process at a time, remembering when front ends went."""

    def __init__(self, stack: RunningStack, kinds: list[str], seed: int, tally: Tally) -> None:
        self._stack = stack
        self._kinds = kinds
        self._random = random.Random(seed)
        self._tally = tally
        self.front_end_deaths: list[float] = []

    async def run(self, interval: float, until: float) -> None:
        """Disturb every `interval` seconds or so, until `until` (monotonic)."""
        while self._kinds and time.monotonic() < until - interval:
            await asyncio.sleep(interval * self._random.uniform(0.5, 1.5))
            await self._disturb(self._random.choice(self._kinds))

    async def _disturb(self, kind: str) -> None:
        name = "engine" if kind == "stop" else kind
        victims = [p for n, p in self._stack.processes().items() if n.split()[0] == name]
        if len(victims) < (1 if name == "coordinator" else 2):
            return  # the last of its kind is still starting again: nobody could take over
        victim = self._random.choice(victims)
        self._tally.kills[kind] += 1
        if kind == "api":
            self.front_end_deaths.append(time.monotonic())
        with_signal = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
        victim.send_signal(with_signal)
        if kind == "stop":
            await asyncio.sleep(STOP_SECONDS)
            if victim.is_running():
                victim.send_signal(signal.SIGCONT)


async def one_client(
    url: str, todo: list[Task], expected: dict[int, str], chooser: random.Random, until: float,
    tally: Tally, disturber: Disturber,
) -> None:  # fmt: skip
    """Send requests one after the other until the time is over."""
    while time.monotonic() < until:
        which = chooser.randrange(len(todo))
        began = time.monotonic()
        try:
            # A connection of its own: the next request must not inherit a dead front end's.
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                answer = await ask(client, todo[which], tally)
        except (httpx.HTTPError, ConnectionError, ValueError) as error:
            if any(death > began - 0.5 for death in disturber.front_end_deaths):
                tally.excused += 1
            else:
                tally.failed.append(f"{type(error).__name__}: {error}")
            continue
        if answer == expected[which]:
            tally.ok += 1
        else:
            tally.wrong.append(f"{todo[which]}: {answer[:200]} instead of {expected[which][:200]}")


async def storm(stack: RunningStack, options: argparse.Namespace, progress: Progress) -> Tally:
    """Run the whole thing against a started stack."""
    todo = tasks(options.tokens)
    expected = {}
    calm = Tally()
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        for i, task in enumerate(todo):
            expected[i] = await ask(client, task, calm)
    tally = Tally()
    until = time.monotonic() + options.minutes * 60
    disturber = Disturber(stack, options.kinds, options.seed, tally)
    jobs = [asyncio.create_task(disturber.run(options.interval, until))] + [
        asyncio.create_task(
            one_client(
                stack.url, todo, expected, random.Random(options.seed * 1000 + i), until, tally,
                disturber,
            )
        )
        for i in range(options.clients)
    ]  # fmt: skip
    shown = progress.add_task("storm", total=options.minutes * 60)
    while not all(job.done() for job in jobs):
        await asyncio.wait(jobs, timeout=0.5)
        left = max(0.0, until - time.monotonic())
        progress.update(
            shown,
            completed=options.minutes * 60 - left,
            description=f"{tally.ok} right, {len(tally.failed)} failed, {tally.kills.total()} hits",
        )
    await asyncio.gather(*jobs)
    return tally


class Rest:
    """What the metrics say, and leave behind, when nothing is going on."""

    def __init__(self, directory: Path) -> None:
        (self._directory,) = directory.iterdir()  # the node's own, in the one that it was given
        self._metrics = self._directory / "metrics"

    def wait(self, stack: RunningStack, within: float = 45.0) -> bool:
        """Wait until all processes are there again and no gauge counts a request."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                residue = self.residue(stack)
                everybody = len(stack.processes()), residue["engines up"], residue["front ends"]
                if everybody == (7, 3, 2) and residue["requests in gauges"] == 0:
                    return True
            time.sleep(0.5)
        return False

    def residue(self, stack: RunningStack) -> dict[str, float]:
        """Return counts that must not grow with the number of processes that died."""
        text = httpx.get(f"{stack.url}/metrics", timeout=10).text
        samples = [line.split() for line in text.splitlines() if not line.startswith("#")]

        def total(*names: str) -> float:
            wanted = tuple(f"swell_{name}" for name in names)
            return sum(float(s[-1]) for s in samples if s[0].partition("{")[0] in wanted)

        return {
            "requests in gauges": total("num_requests_running", "num_requests_waiting"),
            "KV blocks in use, share": total("kv_cache_usage_perc"),
            "engines up": total("engine_up"),
            "front ends": total("front_ends"),
            "series": len(samples),
            "metric files": len(list(self._metrics.iterdir())),
            "files in the socket directory": len(list(self._directory.iterdir())),
        }

    @staticmethod
    def report(console: Console, before: dict[str, float], after: dict[str, float]) -> None:
        """Print both."""
        table = Table("at rest", "before", "after")
        for name, value in before.items():
            table.add_row(name, f"{value:g}", f"{after[name]:g}")
        console.print(table)


def resources(stack: RunningStack) -> dict[str, tuple[float, int, int]]:
    """Return (resident MB, open files, threads) per process."""
    found = {}
    for name, process in stack.processes().items():
        try:
            resident = process.memory_info().rss / 1e6
            found[name] = (resident, process.num_fds(), process.num_threads())
        except psutil.Error:
            continue
    return found


def report(
    console: Console, tally: Tally, before: dict[str, tuple[float, int, int]],
    after: dict[str, tuple[float, int, int]],
) -> None:  # fmt: skip
    """Print what happened."""
    console.print(f"disturbances: {dict(tally.kills)}")
    console.print(
        f"requests: {tally.ok} right, {len(tally.wrong)} wrong, {len(tally.failed)} failed, "
        f"{tally.excused} lost with a killed front end"
    )
    console.print(f"longest pause within a stream: {tally.longest_gap:.2f} s")
    for what, examples in (("wrong", tally.wrong), ("failed", tally.failed)):
        for example, count in Counter(examples).most_common(5):
            console.print(f"[red]{what} x{count}[/] {example}", soft_wrap=True)
    table = Table("process", "resident MB", "open files", "threads", title="before -> after")
    for name in sorted(after):
        old, new = before.get(name, (0.0, 0, 0)), after[name]
        table.add_row(
            name, f"{old[0]:.0f} -> {new[0]:.0f}", f"{old[1]} -> {new[1]}", f"{old[2]} -> {new[2]}"
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the storm lasts")
    parser.add_argument("--interval", type=float, default=8.0, help="seconds between disturbances")
    parser.add_argument("--clients", type=int, default=24, help="requests under way at once")
    parser.add_argument("--tokens", type=int, default=60, help="tokens per choice")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything random")
    parser.add_argument(
        "--kinds", nargs="+", default=["engine", "stop", "coordinator", "api"],
        choices=["engine", "stop", "coordinator", "api"], help="what may happen",
    )  # fmt: skip
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    flags = ["--data-parallel-size", "3", "--batch-invariant", "--log-level", "error"]
    flags += options.serve
    with (
        TemporaryDirectory(prefix="chaos-") as directory,
        RunningStack(*flags, "--socket-dir", directory, timeout=300) as stack,
    ):
        with Progress(console=console) as progress:
            rest = Rest(Path(directory))
            warm_up = argparse.Namespace(**{**vars(options), "minutes": 0.1, "kinds": []})
            asyncio.run(storm(stack, warm_up, progress))
            before, residue_before = resources(stack), rest.residue(stack)
            tally = asyncio.run(storm(stack, options, progress))
            is_calm = rest.wait(stack)
        report(console, tally, before, resources(stack))
        rest.report(console, residue_before, rest.residue(stack))
        stack.stop()
    return 1 if tally.failed or tally.wrong or not is_calm else 0


if __name__ == "__main__":
    sys.exit(main())
