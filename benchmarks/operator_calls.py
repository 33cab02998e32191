"""What clients see of each operator's call on a loaded stack; prints a table.

Clients stream completions of two engines, one after another each. While all of them receive tokens,
a call is sent, and later what ends its effect. Engines are batch-invariant and prompts have seeds,
so each client's answer is the text that it received without any calls, or its beginning if the call
aborted it.

    python -m benchmarks.operator_calls
    python -m benchmarks.operator_calls --only sleep --clients 16
"""

import argparse
import contextlib
import http.client
import json
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psutil
from safetensors.torch import load_file

from benchmarks.running_stack import RunningStack
from engine.shared.config.model import BUNDLED_MODEL
from swell.trainer import WeightSender

ADMIN_KEY = "admin-secret"
PATIENCE = 150.0
"""Longer than any call or answer may take, in seconds."""
HELD = 0.5
"""Seconds for which a pause or sleep lasts."""
TOKENS = 128

_MODULE = "from engine.core.extensions import Worker\n\n\ndef rank(worker: Worker) -> int:\n"
_MODULE += "    return worker.rank\n"


@dataclass
class Stream:
    """A completion as its client received it."""

    text: str = ""
    finish_reason: str | None = None
    version: str = ""
    """X-Weight-Version."""
    longest_pause: float = 0.0
    """Seconds between two chunks, the first from the request on."""
    error: str = "the stream ended early"


class Client(threading.Thread):
    """Streams the same completion again and again until told to stop."""

    def __init__(self, url: str, seed: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.streams: list[Stream] = []
        self.receives = threading.Event()
        """Whether the current stream has begun."""
        self._address = urlsplit(url).netloc
        self._seed = seed
        self._over = over

    def run(self) -> None:
        while not self._over.is_set():
            stream = Stream()
            try:
                self._receive(stream)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                stream.error = repr(error)
            self.receives.clear()
            self.streams.append(stream)

    def _receive(self, stream: Stream) -> None:
        body = {
            "model": "swell-shakespeare", "prompt": f"Act {self._seed}", "max_tokens": TOKENS,
            "seed": self._seed, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
        try:
            before = time.monotonic()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            stream.version = answer.headers.get("X-Weight-Version", "")
            if answer.status != 200:
                stream.error = f"{answer.status} {answer.read().decode()}"
                return
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                stream.longest_pause = max(stream.longest_pause, now - before)
                before = now
                if line.strip() == b"data: [DONE]":
                    stream.error = ""
                    return
                [choice] = json.loads(line[6:])["choices"]
                stream.text += choice["text"]
                stream.finish_reason = choice["finish_reason"]
                self.receives.set()
        finally:
            connection.close()


@dataclass
class Scene:
    """A running stack, and the directory that its `--weights-dir` names."""

    stack: RunningStack
    directory: Path
    undisturbed: list[str] = field(default_factory=list)
    """Text of each client's answer."""

    def ask(self, path: str, body: object = None) -> Any:
        """Send a GET, or a POST with a body; return the answer.

        Raises:
            RuntimeError: it was refused; the message has the status and the answer.
            OSError: there was no answer.
        """
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.stack.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{error.code} {error.read().decode()}") from None

    def infos(self) -> dict[int, dict[str, Any]]:
        """Return what engines say of themselves, by rank."""
        answers = self.ask("/admin/utilities", {"name": "info"})["answers"]
        return {each["rank"]: each["result"] for each in answers if each["result"]}

    def versions(self) -> set[str]:
        """Return the engines' weight versions; "" for the first weights."""
        return {str(info["weight_version"]) for info in self.infos().values()}


Step = Callable[[Scene], object]


def post(path: str, body: object = None) -> Step:
    return lambda scene: scene.ask(path, body or {})


def get(path: str) -> Step:
    return lambda scene: scene.ask(path)


def hold(_: Scene) -> None:
    time.sleep(HELD)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it was not met in time.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("not in time")
        time.sleep(0.05)


def settled(size: int) -> Step:
    """Wait until there are so many engines, all ready."""

    def are_ready(scene: Scene) -> bool:
        engines = scene.ask("/status.json")["engines"]
        ready = {each["rank"] for each in engines if each["ready"]}
        return not scene.ask("/admin/scale")["busy"] and ready == set(range(size))

    return lambda scene: until(lambda: are_ready(scene))


def kill_two(scene: Scene) -> None:
    """Kill the coordinator and an engine; wait until its successor is paused."""
    scene.stack.processes()["coordinator"].kill()
    killed = scene.stack.processes()["engine 0"]
    killed.kill()

    def are_paused() -> bool:
        living = scene.stack.processes().get("engine 0")
        with contextlib.suppress(RuntimeError):  # no engine is known to the new coordinator yet
            infos = scene.infos().values()
            return living not in (None, killed) and [i["is_paused"] for i in infos] == [True] * 2
        return False

    until(are_paused)


def checkpoint(mode: str, version: str) -> Step:
    """Load a copy of the weights, as another version."""

    def load(scene: Scene) -> object:
        model = str(shutil.copytree(BUNDLED_MODEL, scene.directory / version))
        body = {"model": model, "weight_version": version, "mode": mode}
        return scene.ask("/admin/weights", body)

    return load


def fail_in_one(scene: Scene) -> None:
    """Have engine 1 fail to open the files of a checkpoint, so that engine 0 goes back."""
    engine = scene.stack.processes()["engine 1"]
    limits = engine.rlimit(psutil.RLIMIT_NOFILE)
    assert limits is not None
    used = {int(each.name) for each in Path(f"/proc/{engine.pid}/fd").iterdir()}
    free = min({*range(len(used) + 1)} - used)
    before = scene.versions()
    engine.rlimit(psutil.RLIMIT_NOFILE, (free, limits[1]))
    try:
        checkpoint("rolling", "fails")(scene)
    except RuntimeError as refused:
        if "engine 1" not in str(refused):
            raise
    else:
        raise RuntimeError("it was not refused")
    finally:
        engine.rlimit(psutil.RLIMIT_NOFILE, limits)
    if scene.versions() != before:
        raise RuntimeError(f"weights {scene.versions()} instead of {before}")


def train(scene: Scene) -> None:
    """Send the weights as a trainer does."""
    with WeightSender(scene.stack.url, ADMIN_KEY, timeout=PATIENCE) as sender:
        sender.send(load_file(BUNDLED_MODEL / "model.safetensors"), "sent")


CASES: dict[str, tuple[Step, ...]] = {
    "/pause?mode=keep": (post("/pause?mode=keep"), hold, post("/resume")),
    "/pause?mode=wait": (post("/pause?mode=wait"), hold, post("/resume")),
    "/pause?mode=abort": (post("/pause?mode=abort"), hold, post("/resume")),
    "/pause?mode=move": (post("/pause?mode=move"), hold, post("/resume")),
    "/pause?mode=keep&rank=0": (post("/pause?mode=keep&rank=0"), hold, post("/resume?rank=0")),
    "/pause?mode=move&rank=0": (post("/pause?mode=move&rank=0"), hold, post("/resume?rank=0")),
    "/pause?mode=keep, coordinator and engine killed": (
        post("/pause?mode=keep"), kill_two, post("/resume"), settled(2),
    ),
    "/sleep?level=0&mode=keep": (post("/sleep?level=0&mode=keep"), hold, post("/wake_up")),
    "/sleep?level=1&mode=keep": (post("/sleep?level=1&mode=keep"), hold, post("/wake_up")),
    "/sleep?level=1&mode=wait": (post("/sleep?level=1&mode=wait"), hold, post("/wake_up")),
    "/sleep?level=1&mode=abort": (post("/sleep?level=1&mode=abort"), hold, post("/wake_up")),
    "/sleep?level=1&mode=move&rank=0": (
        post("/sleep?level=1&mode=move&rank=0"), hold, post("/wake_up?rank=0"),
    ),
    "/sleep?level=2&mode=keep, /wake_up by tags": (
        post("/sleep?level=2&mode=keep"), hold, post("/wake_up?tags=weights"),
        get("/is_sleeping"), post("/wake_up?tags=kv_cache"),
    ),
    "/reset_prefix_cache": (post("/reset_prefix_cache"),),
    "/reset_mm_cache, /reset_encoder_cache": (
        post("/reset_mm_cache"), post("/reset_encoder_cache"),
    ),
    "/collective_rpc": (post("/collective_rpc", {"method": "rank"}),),
    "execute_dummy_batch, get_supported_tasks": (
        post("/admin/utilities", {"name": "execute_dummy_batch"}),
        post("/admin/utilities", {"name": "get_supported_tasks"}),
    ),
    "/start_profile, /stop_profile": (post("/start_profile"), hold, post("/stop_profile")),
    "/is_paused and others that only tell": (
        get("/is_paused"), get("/is_sleeping"), post("/is_scaling_elastic_ep"),
        get("/get_world_size"), get("/v1/fault_tolerance/status"),
    ),
    "/admin/weights, rolling": (checkpoint("rolling", "one"),),
    "/admin/weights, in place": (checkpoint("in_place", "two"),),
    "/admin/weights, one engine cannot load": (fail_in_one,),
    "/init_weight_transfer_engine, /update_weights": (train,),
    "/admin/weights after a trainer": (checkpoint("in_place", "three"),),
    "/scale_elastic_ep to 3, to 2": (
        post("/scale_elastic_ep", {"new_data_parallel_size": 3}), settled(3),
        post("/scale_elastic_ep", {"new_data_parallel_size": 2}), settled(2),
    ),
    "/admin/restart": (post("/admin/restart"), settled(2)),
}  # fmt: skip
"""By what is called: the call, and what ends its effect."""


@dataclass
class Outcome:
    """What clients saw of a call."""

    seconds: float
    """Until the call was answered."""
    answered: int = 0
    """Streams with the same text as without the call."""
    aborted: int = 0
    lost: list[str] = field(default_factory=list)
    """All other streams."""
    longest_pause: float = 0.0
    """Seconds that a client waited for a chunk."""
    versions: set[str] = field(default_factory=set)
    """What answers said when they began, "" of the first weights."""


@contextmanager
def clients(scene: Scene, number: int) -> Iterator[list[Client]]:
    """Clients that stream until the block ends, each to the end of its last answer.

    The block begins when all have received something.

    Raises:
        TimeoutError: one hangs.
    """
    over = threading.Event()
    started = [Client(scene.stack.url, seed, over) for seed in range(number)]
    for client in started:
        client.start()
    until(lambda: all(each.receives.is_set() or each.streams for each in started))
    try:
        yield started
    finally:
        over.set()
    until(lambda: not any(each.is_alive() for each in started))


@contextmanager
def running_scene(num_clients: int) -> Iterator[Scene]:
    """Start a stack; get each client's answer."""
    with TemporaryDirectory(prefix="operators-") as name:
        directory = Path(name)
        metadata = directory / "operators-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: operators\nVersion: 1\n")
        points = "[swell.worker_extensions]\nrank = operators_rank:rank\n"
        (metadata / "entry_points.txt").write_text(points)
        (directory / "operators_rank.py").write_text(_MODULE)
        with RunningStack(
            "--data-parallel-size", "2", "--min-ready-engines", "2", "--api-server-count", "2",
            "--batch-invariant", "--num-kv-blocks", "4096", "--admin-key", ADMIN_KEY,
            "--weights-dir", name, "--worker-extensions", "rank", "--torch-profiler-dir", name,
            "--halted-timeout", str(int(PATIENCE)),
            environment={"PYTHONPATH": name},
        ) as stack:  # fmt: skip
            scene = Scene(stack, directory)
            with clients(scene, num_clients) as undisturbed:
                pass
            scene.undisturbed = [each.streams[0].text for each in undisturbed]
            yield scene


def see(scene: Scene, *cases: str) -> Outcome:
    """Send the calls of cases, one after the other, while clients stream.

    Raises:
        RuntimeError, OSError: a call failed.
        TimeoutError: it was without effect, or a client hangs.
    """
    first, *others = (step for case in cases for step in CASES[case])
    with clients(scene, len(scene.undisturbed)) as streaming:
        before = time.monotonic()
        first(scene)
        seconds = time.monotonic() - before
        for step in others:
            step(scene)
    outcome = Outcome(seconds)
    for client, whole in zip(streaming, scene.undisturbed, strict=True):
        for each in client.streams:
            outcome.longest_pause = max(outcome.longest_pause, each.longest_pause)
            outcome.versions.add(each.version)
            if each.finish_reason == "length" and each.text == whole and not each.error:
                outcome.answered += 1
            elif each.finish_reason == "abort" and whole.startswith(each.text):
                outcome.aborted += 1
            else:
                outcome.lost.append(f"{each.finish_reason} {each.error or each.text}")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="calls that contain this")
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    print("| call | answered after s | whole | aborted | lost | longest pause s | weights then |")
    print("|---|---|---|---|---|---|---|")
    num_lost = 0
    with running_scene(options.clients) as scene:
        for case in CASES:
            if options.only in case:
                seen = see(scene, case)
                num_lost += len(seen.lost)
                print(
                    f"| {case} | {seen.seconds:.2f} | {seen.answered} | {seen.aborted} | "
                    f"{len(seen.lost)} | {seen.longest_pause:.1f} | "
                    f"{', '.join(sorted(scene.versions()))} |",
                    flush=True,
                )
                for each in seen.lost[:3]:
                    print(each, file=sys.stderr)
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
