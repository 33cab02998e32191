"""Kills and stops processes under load, and compares every answer byte for byte with a calm run.

Three engines and two API servers get greedy and seeded streams, whole answers, chats, choices, log
probabilities and answers by JSON schema, all at once. Then one engine is killed, another one is
stopped for a while, and the coordinator is killed. Every answer must be complete and the same as in
the calm run. That requires batch-invariant engines, which is the default where it costs little
(docs/engine.md): otherwise a batch of another size may round to another token without the flag.

With --minutes, random processes, including front ends, are killed or stopped for that long, while
--clients clients send the same requests in random order. Requests on connections of a killed front
end may fail. Afterwards no process may be missing and no gauge may count a request.

With --split, engine 0 computes the prompts and two others answer, over local sockets or, with
--tcp, over encrypted TCP. Each round strikes once during a KV block transfer: it kills or stops a
process, or cuts, stalls or corrupts the link. Every answer must equal that of a single engine, and
after each round all KV blocks must be free.

    python -m benchmarks.failover
    python -m benchmarks.failover --streams 8 --tokens 60 --stop-seconds 8
    python -m benchmarks.failover --minutes 5 --streams 8 --tokens 60 --stop-seconds 8
    python -m benchmarks.failover -- --dtype bfloat16 --batch-invariant
    python -m benchmarks.failover --split 5 --streams 8 --tokens 60 --stop-seconds 8
    python -m benchmarks.failover --split 5 --tcp --streams 8 --tokens 60 --stop-seconds 8
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.block_links import BlockLinks
from benchmarks.running_stack import RunningStack, free_ports

MODEL = "swell-shakespeare"
NUM_ENGINES = 3
NUM_PROCESSES = NUM_ENGINES + 4
"""Including two API servers, the coordinator and the supervisor."""
SPEAKERS = ["ROMEO", "JULIET", "KING HENRY", "First Citizen", "GLOUCESTER", "LADY ANNE", "WARWICK"]
SCHEMA = {
    "type": "object",
    "properties": {"speaker": {"type": "string", "maxLength": 20}, "act": {"type": "integer"}},
    "required": ["speaker", "act"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Request:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Answer:
    """The content of an answer, and its timing."""

    output: str = ""
    error: str | None = None
    longest_pause: float = 0.0
    first_after: float = 0.0
    """Seconds until the first data."""
    port: int = 0
    """Client port of its connection."""


@dataclass
class Progress:
    """Number of pieces received, to time the strikes."""

    pieces: int = 0
    disturbances: list[tuple[float, str]] = field(default_factory=list)


def make_requests(streams: int, tokens: int, about: str = "") -> list[Request]:
    """Return the mix of requests: two kinds of streams in full number, the others an eighth each.

    All prompts end with `about`.
    """
    requests: list[Request] = []
    few = max(1, streams // 8)

    def completion(kind: str, number: int, **options: object) -> None:
        prompt = f"{SPEAKERS[number % len(SPEAKERS)]}: say {number} times what{about}"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        requests.append(Request(kind, "/v1/completions", {**body, "seed": number, **options}))

    for number in range(streams):
        completion("greedy stream", number, temperature=0, stream=True)
        completion("seeded stream", number, temperature=1.0, stream=True)
    for number in range(few):
        completion("whole", number, temperature=1.0)
        completion("n=2", number, temperature=0.8, n=2, stream=True)
        completion("logprobs", number, temperature=1.0, logprobs=3, stream=True)
        messages = [{"role": "user", "content": f"Tell me of {SPEAKERS[number % 7]}{about}"}]
        chat: dict[str, Any] = {"model": MODEL, "messages": messages, "seed": number}
        options = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
        requests.append(Request("chat", "/v1/chat/completions", {**chat, **options}))
        schema = {"type": "json_schema", "json_schema": {"name": "line", "schema": SCHEMA}}
        requests.append(
            Request("JSON schema", "/v1/chat/completions",
                {**chat, "max_tokens": tokens, "response_format": schema})
        )  # fmt: skip
    return requests


async def streamed_choices(
    client: httpx.AsyncClient, path: str, body: dict[str, Any],
    extensions: dict[str, Any] | None = None,
) -> AsyncIterator[list[dict[str, Any]]]:  # fmt: skip
    """Send a streaming request and yield the choices of every event, which can be empty.

    Args:
        extensions: httpx request extensions.

    Raises:
        httpx.HTTPError: the connection failed, or the answer is not a stream.
        ValueError: an event reports an error.
        ConnectionError: the stream ended early.
    """
    body = {**body, "stream": True}
    async with client.stream("POST", path, json=body, extensions=extensions) as response:
        if response.is_error:
            await response.aread()
            response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            yield event["choices"]
    raise ConnectionError("the stream ended without [DONE]")


def text_of(choice: dict[str, Any]) -> str:
    """Return the text that a choice of a streamed completion or chat adds."""
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""


async def answer(client: httpx.AsyncClient, request: Request, progress: Progress) -> Answer:
    """Send one request and record everything that must be equal in every run."""
    result = Answer()
    started_at = time.monotonic()

    async def traced(event: str, about: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            result.port = about["return_value"].get_extra_info("client_addr")[1]

    async def stream() -> str:
        pieces: dict[int, list[str]] = {}
        scores: dict[int, list[Any]] = {}
        reasons: dict[int, str] = {}
        last: float | None = None
        async for choices in streamed_choices(client, request.path, request.body, extensions):
            now = time.monotonic()
            result.first_after = result.first_after or now - started_at
            result.longest_pause = max(result.longest_pause, now - (last or now))
            last = now
            progress.pieces += 1
            for choice in choices:
                index = choice["index"]
                pieces.setdefault(index, []).append(text_of(choice))
                if logprobs := choice.get("logprobs"):
                    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                    scores.setdefault(index, []).extend(pairs)
                if choice.get("finish_reason"):
                    reasons[index] = choice["finish_reason"]
        return json.dumps(
            [[i, "".join(pieces[i]), scores.get(i), reasons.get(i)] for i in sorted(pieces)]
        )

    async def whole() -> str:
        response = await client.post(request.path, json=request.body, extensions=extensions)
        body = response.json()
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {body}")
        return json.dumps([body["choices"], body["usage"]["completion_tokens"]])

    extensions = {"trace": traced}
    try:
        result.output = await (stream() if request.body.get("stream") else whole())
    except (httpx.HTTPError, ValueError, ConnectionError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


Disturbance = Callable[[Progress], Awaitable[None]]
"""Strikes while answers arrive."""


async def run(
    url: str, requests: list[Request], disturbance: Disturbance | None, progress: Progress
) -> list[Answer]:
    """Send all requests at once and return the answers in order."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        jobs = [asyncio.create_task(answer(client, request, progress)) for request in requests]
        disturbing = (
            asyncio.ensure_future(disturbance(progress)) if disturbance is not None else None
        )
        answers = await asyncio.gather(*jobs)
        if disturbing is not None:
            await disturbing
        return answers


async def until_arrived(progress: Progress, pieces: float) -> None:
    """Wait until this many pieces have been received, at most 20 seconds."""
    deadline = time.monotonic() + 20
    while True:
        if progress.pieces >= pieces or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.02)


async def strike_three_times(
    stack: RunningStack, stop_seconds: float, pieces: int, progress: Progress
) -> None:
    """Kill an engine, stop another, kill the coordinator; wake the stopped one.

    Args:
        pieces: the number of pieces of an undisturbed run.
    """

    def send(name: str, signum: signal.Signals) -> psutil.Process:
        process = stack.processes()[name]
        process.send_signal(signum)
        progress.disturbances.append((time.monotonic(), f"{signum.name} {name}"))
        return process

    await until_arrived(progress, 0.15 * pieces)
    send("engine 0", signal.SIGKILL)
    await until_arrived(progress, 0.3 * pieces)
    stopped = send("engine 1", signal.SIGSTOP)
    woken = time.monotonic() + stop_seconds
    await until_arrived(progress, 0.4 * pieces)
    send("coordinator", signal.SIGKILL)
    await asyncio.sleep(max(0.0, woken - time.monotonic()))
    stopped.send_signal(signal.SIGCONT)


def report(
    console: Console, requests: list[Request], baseline: list[Answer], disturbed: list[Answer],
    progress: Progress,
) -> bool:  # fmt: skip
    """Print the comparison; return whether all answers were the same."""
    first = progress.disturbances[0][0]
    for at, what in progress.disturbances:
        console.print(f"{at - first:6.2f} s  {what}")
    table = Table("kind", "requests", "complete", "identical", "longest pause")
    all_identical = True
    for kind in dict.fromkeys(request.kind for request in requests):
        which = [i for i, request in enumerate(requests) if request.kind == kind]
        complete = sum(disturbed[i].error is None and baseline[i].error is None for i in which)
        same = sum(
            disturbed[i].output == baseline[i].output and disturbed[i].error is None for i in which
        )
        pause = max(disturbed[i].longest_pause for i in which)
        table.add_row(
            kind, str(len(which)), str(complete), str(same), f"{pause:.2f} s" if pause else "-"
        )
        all_identical &= complete == same == len(which)
    console.print(table)
    for request, before, after in zip(requests, baseline, disturbed, strict=True):
        if after.error or before.error or after.output != before.output:
            console.print(f"[red]{request.kind}[/] {request.body.get('prompt')}", soft_wrap=True)
            console.print(f"   calm: {before.error or before.output[:300]}", soft_wrap=True)
            console.print(f"  storm: {after.error or after.output[:300]}", soft_wrap=True)
    pauses = sorted((each.longest_pause for each in disturbed if each.longest_pause), reverse=True)
    short = sum(pause < 1.0 for pause in pauses)
    console.print(
        f"longest pause in any stream: {pauses[0]:.2f} s; {short} of {len(pauses)} streams "
        "paused for less than a second"
    )
    return all_identical


# -- minutes of random disturbances ----------------------------------------------------------------

KINDS = ("engine", "stop", "coordinator", "api")
INTERVAL = 8.0
"""Mean seconds between disturbances."""


@dataclass
class Tally:
    """Results of the run."""

    strikes: Counter[str] = field(default_factory=Counter)
    front_end_deaths: list[float] = field(default_factory=list)
    right: int = 0
    excused: int = 0
    """Failed while a front end was killed."""
    wrong: list[str] = field(default_factory=list)
    longest_pause: float = 0.0


async def strike(stack: RunningStack, tally: Tally, deadline: float, stop_seconds: float) -> None:
    """Kill or stop a random process at random intervals."""
    while time.monotonic() < deadline - INTERVAL:
        await asyncio.sleep(INTERVAL * random.uniform(0.5, 1.5))
        kind = random.choice(KINDS)
        name = "engine" if kind == "stop" else kind
        victims = [each for title, each in stack.processes().items() if title.split()[0] == name]
        if len(victims) < (1 if name == "coordinator" else 2):
            continue  # the last of its kind is still starting: nothing could take over
        tally.strikes[kind] += 1
        if kind == "api":
            tally.front_end_deaths.append(time.monotonic())
        victim = random.choice(victims)
        victim.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "stop":
            await asyncio.sleep(stop_seconds)
            if victim.is_running():
                victim.send_signal(signal.SIGCONT)


async def client(
    url: str, requests: list[Request], baseline: list[Answer], tally: Tally, deadline: float
) -> None:
    """Send requests one after the other, each on a new connection."""
    while time.monotonic() < deadline:
        which, started_at = random.randrange(len(requests)), time.monotonic()
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            result = await answer(http, requests[which], Progress())
        tally.longest_pause = max(tally.longest_pause, result.longest_pause)
        if result.error is None and result.output == baseline[which].output:
            tally.right += 1
        elif result.error and any(death > started_at - 0.5 for death in tally.front_end_deaths):
            tally.excused += 1
        else:
            tally.wrong.append(f"{requests[which].kind}: {result.error or result.output[:200]}")


def is_idle(stack: RunningStack) -> bool:
    """Return whether all processes run and no gauge counts a request."""
    if len(stack.processes()) != NUM_PROCESSES:
        return False
    with contextlib.suppress(httpx.HTTPError):
        text = httpx.get(f"{stack.url}/metrics", timeout=10).text
        busy = re.findall(r"^swell_(?:num_requests_\w+|kv_cache_usage_perc)\{.* (\S+)$", text, re.M)
        up = re.findall(r"^swell_engine_up\{.* 1\.0$", text, re.M)
        return len(up) == NUM_ENGINES and not any(map(float, busy))
    return False


def resources(stack: RunningStack) -> dict[str, list[int]]:
    """Return resident MB, open files and threads of each process."""
    return {
        name: [process.memory_info().rss // 10**6, process.num_fds(), process.num_threads()]
        for name, process in sorted(stack.processes().items())
    }


def disturb_for_minutes(
    stack: RunningStack,
    requests: list[Request],
    baseline: list[Answer],
    options: argparse.Namespace,
) -> bool:
    """Disturb a stack for minutes; print the results, and return whether there were no problems."""
    console, tally, before = Console(), Tally(), resources(stack)
    deadline = time.monotonic() + 60 * options.minutes

    async def everything() -> None:
        clients = [
            client(stack.url, requests, baseline, tally, deadline) for _ in range(options.clients)
        ]
        await asyncio.gather(strike(stack, tally, deadline, options.stop_seconds), *clients)

    asyncio.run(everything())
    idle = asyncio.run(becomes_idle(stack, 45))
    console.print(f"disturbances: {dict(tally.strikes)}")
    console.print(
        f"requests: {tally.right} right, {len(tally.wrong)} wrong or failed, {tally.excused} lost "
        f"with a killed front end; longest pause within a stream: {tally.longest_pause:.2f} s"
    )
    for example, count in Counter(tally.wrong).most_common(5):
        console.print(f"[red]wrong x{count}[/] {example}", soft_wrap=True)
    table = Table("process", "resident MB, open files, threads before", "after")
    for name, after in resources(stack).items():
        table.add_row(name, str(before.get(name, "")), str(after))
    console.print(table)
    console.print("at rest" if idle else "[red]not at rest[/]")
    return idle and not tally.wrong


# -- rounds of strikes at transfers ----------------------------------------------------------------

SPLIT = (
    "--data-parallel-size", str(NUM_ENGINES), "--api-server-count", "2",
    "--prefill-engines", "1", "--prefill-split-length", "256",
)  # fmt: skip
PROMPT = ": friends, Romans, countrymen, lend me your ears; I come to bury Caesar" * 20
"""About 600 tokens with the text before it."""
LINK_RATE = 8e6
"""Bytes per second between engines: transfers take a quarter of a second."""
COORDINATOR_PORTS = 5
IDLE_WITHIN = 60.0
OFFERED_FOR = 65.0
"""Seconds after which unread offers expire, plus one check interval."""
STRIKES = (
    "nothing",
    "prefill engine killed", "prefill engine stopped",
    "decode engine killed", "decode engine stopped",
    "coordinator killed", "API server killed",
    "link cut", "link silent", "blocks damaged",
)  # fmt: skip


class Strike:
    """Strikes once during a transfer of blocks.

    Args:
        kind: one of `STRIKES`.
        stack: target of the strike.
        links: connections between its engines.
        after: number of parts of blocks to pass first.
        seconds: duration of a stop or stall.
    """

    def __init__(
        self, kind: str, stack: RunningStack, links: BlockLinks, after: int, seconds: float
    ) -> None:
        self.excused: set[int] = set()
        """Ports of clients whose connections broke with their API server."""
        self.missed = False
        """Whether there was no transfer to strike, e.g. before links that stalled are back."""
        self._kind = kind
        self._stack = stack
        self._links = links
        self._after = after
        self._seconds = seconds

    async def run(self, progress: Progress) -> None:
        """Wait for a transfer, and strike."""
        try:
            for _ in range(self._after):
                await self._links.flowing()
            link = await self._links.flowing()
        except TimeoutError:
            self.missed = True
            return
        match self._kind.split():
            case ["prefill", _, how]:
                await self._strike(link.offers, how)
            case ["decode", _, how]:
                await self._strike(link.reads, how)
            case ["coordinator", how]:
                await self._strike(self._stack.processes()["coordinator"], how)
            case ["API", _, how]:
                front_end = self._stack.processes()[f"api {self._after % 2}"]
                self.excused = {c.raddr.port for c in front_end.net_connections("tcp") if c.raddr}
                await self._strike(front_end, how)
            case [_, "cut"]:
                link.disconnect()
            case [_, "silent"]:
                await self._links.silence(self._seconds)
            case [_, "damaged"]:
                link.damages = True

    async def _strike(self, victim: psutil.Process, how: str) -> None:
        if how == "killed":
            victim.kill()
            return
        victim.suspend()
        await asyncio.sleep(self._seconds)
        victim.resume()


@dataclass
class Row:
    """Results of one kind of strike."""

    rounds: int = 0
    answers: int = 0
    right: int = 0
    failed: int = 0
    excused: int = 0
    first_after: float = 0.0
    longest_pause: float = 0.0
    rests_after: float = 0.0
    """Seconds after the last answer until every process ran and all blocks were free."""
    broken: float = 0
    """Incomplete transfers. A killed engine does not report them, and a stopped one reports them
    with its next step, which may be in the next round."""


async def by_engine(stack: RunningStack, series: str) -> dict[str, float]:
    """Return the values of a metric by engine rank."""
    async with httpx.AsyncClient(timeout=10) as client:
        text = (await client.get(f"{stack.url}/metrics")).text
    result = re.findall(rf'^swell_{series}\{{engine="(\d+)".* (\S+)$', text, re.M)
    return {engine: float(value) for engine, value in result}


async def becomes_idle(stack: RunningStack, seconds: float = IDLE_WITHIN) -> bool:
    """Wait until the stack is at rest; return False if it takes longer."""
    deadline = time.monotonic() + seconds
    while not (idle := await asyncio.to_thread(is_idle, stack)):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return idle


async def strike_transfers(
    stack: RunningStack, links: BlockLinks, requests: list[Request], baseline: list[Answer],
    plan: Sequence[str], stop_seconds: float,
) -> tuple[dict[str, Row], list[str]]:  # fmt: skip
    """Run these strikes; return the results of each kind, and any problems.

    Args:
        baseline: the answers of an engine that does everything.
        plan: kinds of `STRIKES`, one per round. A round that had no transfer is repeated.
    """
    rows: dict[str, Row] = {kind: Row() for kind in plan}
    problems = []
    remaining = deque(plan)
    for number in range(2 * len(plan)):
        if not remaining:
            break
        kind = remaining[0]
        row = rows[kind]
        strike = Strike(kind, stack, links, 3 * row.rounds, stop_seconds)
        # With a new salt in each round, no engine has the prompts' blocks.
        salted = [
            replace(request, body={**request.body, "cache_salt": f"{number}"})
            for request in requests
        ]
        broken_before = await by_engine(stack, "kv_transfer_failures_total")
        answers = await run(stack.url, salted, strike.run, Progress())
        over = time.monotonic()
        if not strike.missed:
            remaining.popleft()
            row.rounds += 1
        for request, answer, expected in zip(requests, answers, baseline, strict=True):
            row.answers += 1
            row.first_after = max(row.first_after, answer.first_after)
            row.longest_pause = max(row.longest_pause, answer.longest_pause)
            is_right = answer.error is None and answer.output == expected.output
            is_excused = answer.error is not None and answer.port in strike.excused
            row.right += is_right
            row.excused += is_excused
            row.failed += answer.error is not None and not is_excused
            if not (is_right or is_excused):
                problems.append(f"{kind}, {request.kind}: {answer.error or answer.output}")
        if not await becomes_idle(stack):
            problems.append(f"{kind}: not at rest")
        row.rests_after = max(row.rests_after, time.monotonic() - over)
        for engine, count in (await by_engine(stack, "kv_transfer_failures_total")).items():
            row.broken += max(0, count - broken_before.get(engine, 0))
        print(f"{kind}: {row}", flush=True)
    problems += [f"{kind}: no transfer to strike" for kind in remaining]
    return rows, problems


def split(
    streams: int, tokens: int, flags: Sequence[str], plan: Sequence[str], stop_seconds: float, *,
    over_tcp: bool = False, waits_for_offers: bool = False,
) -> tuple[dict[str, Row], list[str]]:  # fmt: skip
    """Run a split stack and strike at its transfers; see `strike_transfers`.

    Args:
        flags: flags of `swell serve`, including those for batch-invariant engines.
        over_tcp: use TCP with a cluster key instead of local sockets.
        waits_for_offers: check that unread blocks expire, which takes a minute.
    """
    requests = make_requests(streams, tokens, PROMPT)
    with RunningStack("--data-parallel-size", "1", *flags, timeout=300) as stack:
        baseline = asyncio.run(run(stack.url, requests, None, Progress()))

    async def strikes(stack: RunningStack, links: BlockLinks) -> tuple[dict[str, Row], list[str]]:
        between = asyncio.create_task(links.watch())
        await becomes_idle(stack)  # it serves before all engines are there
        rows, problems = await strike_transfers(
            stack, links, requests, baseline, plan, stop_seconds
        )
        if waits_for_offers:
            await asyncio.sleep(OFFERED_FOR)
            # Idle engines do not report stats.
            await run(stack.url, make_requests(1, 1), None, Progress())
            if any((await by_engine(stack, "kv_transfer_offered_bytes")).values()):
                problems.append("blocks are offered for ever")
        await asyncio.to_thread(stack.stop)
        between.cancel()
        return rows, problems

    with TemporaryDirectory(prefix="split-") as name:
        directory = Path(name)
        links = BlockLinks(directory, LINK_RATE, over_tcp=over_tcp)
        where = ["--socket-dir", str(directory / "sockets")]
        if over_tcp:
            key = directory / "key"
            key.write_text("a shared secret of this run")
            where = [
                "--data-parallel-address", "127.0.0.1", "--cluster-key-file", str(key),
                "--data-parallel-rpc-port", str(free_ports(COORDINATOR_PORTS)),
            ]  # fmt: skip
        with RunningStack(
            *where, *SPLIT, *flags, timeout=300, environment=links.environment
        ) as stack:
            return asyncio.run(strikes(stack, links))


def report_strikes(console: Console, rows: dict[str, Row], problems: list[str]) -> None:
    """Print the results of each kind of strike."""
    table = Table(
        "strike", "answers", "right", "wrong", "failed", "lost with their API server",
        "transfers broken off", "latest first token", "longest pause", "at rest after",
    )  # fmt: skip
    for kind, row in rows.items():
        wrong = row.answers - row.right - row.failed - row.excused
        numbers = (row.answers, row.right, wrong, row.failed, row.excused, round(row.broken))
        seconds = (row.first_after, row.longest_pause, row.rests_after)
        table.add_row(kind, *map(str, numbers), *(f"{each:.1f} s" for each in seconds))
    console.print(table)
    for problem, count in Counter(problems).most_common(10):
        console.print(f"[red]x{count}[/] {problem[:400]}", soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="greedy and seeded streams each")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per choice")
    parser.add_argument("--stop-seconds", type=float, default=20.0, help="how long one is stopped")
    parser.add_argument("--minutes", type=float, default=0.0, help="of random disturbances")
    parser.add_argument("--clients", type=int, default=24, help="of --minutes")
    parser.add_argument("--split", type=int, default=0, help="strikes of each kind at transfers")
    parser.add_argument("--tcp", action="store_true", help="--split over TCP with a cluster key")
    parser.add_argument("--only", default="", help="strikes of --split whose name contains this")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    if options.split:
        rows, problems = split(
            options.streams, options.tokens,
            ["--batch-invariant", "--log-level", "error", *options.serve],
            [kind for kind in STRIKES if options.only in kind] * options.split,
            options.stop_seconds, over_tcp=options.tcp, waits_for_offers=True,
        )  # fmt: skip
        report_strikes(console, rows, problems)
        return 1 if problems else 0
    requests = make_requests(options.streams, options.tokens)
    flags = ["--data-parallel-size", str(NUM_ENGINES), "--api-server-count", "2"]
    with RunningStack(*flags, "--log-level", "error", *options.serve, timeout=300) as stack:
        counted = Progress()
        started_at = time.monotonic()
        baseline = asyncio.run(run(stack.url, requests, None, counted))
        console.print(f"calm: {len(requests)} requests in {time.monotonic() - started_at:.1f} s")
        if options.minutes:
            return 0 if disturb_for_minutes(stack, requests, baseline, options) else 1
        disturbance = partial(strike_three_times, stack, options.stop_seconds, counted.pieces)
        progress = Progress()
        started_at = time.monotonic()
        disturbed = asyncio.run(run(stack.url, requests, disturbance, progress))
        console.print(f"storm: {len(requests)} requests in {time.monotonic() - started_at:.1f} s")
        same = report(console, requests, baseline, disturbed, progress)
        stack.stop(timeout=30)
    console.print("everything complete and identical" if same else "[red]not the same[/]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
