"""An actor on a node of a Ray cluster: starts a program there and tells the supervisor of it.

The engine is a process of its own below the actor, the same `python -m engine` as on a plain
node, for three reasons. Ray takes over the signals and threads of an actor's process. An engine
that dies leaves its actor to say how. And the lifeline between the two closes with whichever
goes first: however an actor ends (killed, with its raylet, with the driver's job), its engine
ends within `engine.shared.lifeline.ORPHAN_GRACE` seconds, as every orphan does.

A supervisor asks again and again for events. An actor that is not asked ends itself, whether Ray
knows that its supervisor has gone or not.

The class goes to other nodes by value and imports nothing of this project before it has said
which version of it is there; so a node with another one, or none, is refused by name.
"""

import asyncio
import contextlib
import importlib
import os
import sys
from importlib import metadata
from typing import Any

ASKED_WITHIN = 15.0
"""Seconds that an actor lives without being asked anything by its supervisor."""

ANSWER_WITHIN = 3.0
"""Seconds after which a supervisor that asks for events is told that there are none."""

LOOK_INTERVAL = 1.0
"""Seconds between looks at how long ago the supervisor has asked."""


class EngineActor:
    """Holds one engine, or API server, on this node for a supervisor elsewhere.

    Methods take and return bytes; `server.fleet.ray.messages` says what they mean.
    """

    def __init__(self, driver_directory: str = "") -> None:
        """`driver_directory`: the supervisor's current directory.

        Ray puts it in front of the module search path, where a model directory's server.py would
        replace ours.
        """
        with contextlib.suppress(ValueError):
            sys.path.remove(driver_directory)
        self._unasked = 0.0
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._events: list[Any] = []
        self._lines = 0
        self._news = asyncio.Event()
        self._child: Any = None

    async def installed(self) -> dict[str, str]:
        """Return the versions of what is installed here, and the process's id."""
        self._unasked = 0.0
        found = {"pid": str(os.getpid())}
        for name, module, attribute in (
            ("swell", "engine.shared.version", "SWELL_VERSION"),
            ("relay", "server.fleet.ray.messages", "__name__"),
        ):
            try:
                found[name] = str(getattr(importlib.import_module(module), attribute))
            except (ImportError, AttributeError) as error:
                found[name] = f"none ({error})"
        try:
            found["torch"] = metadata.version("torch")
        except metadata.PackageNotFoundError:
            found["torch"] = "none"
        return found

    async def start(self, launch: bytes) -> None:
        """Start the program; what happens to it is reported by `events`.

        Raises:
            OSError: it cannot be started.
        """
        from server.fleet.ray.relay import start_program

        self._unasked = 0.0
        self._child = await start_program(launch, self._put)
        self._ending = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        from server.fleet.ray.messages import Exited

        end = await self._child.wait()
        self._put(Exited(end.code))

    def _put(self, event: Any) -> None:
        from server.fleet.ray.messages import MAX_WAITING_LINES, Line

        if isinstance(event, Line):
            self._lines += 1
            if self._lines > MAX_WAITING_LINES:
                return
        self._events.append(event)
        self._news.set()

    async def events(self) -> bytes:
        """Return all events; none if for a while there are none."""
        import msgspec

        self._unasked = 0.0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), ANSWER_WITHIN)
        self._news.clear()
        told, self._events, self._lines = self._events, [], 0
        return msgspec.msgpack.encode(told)

    async def terminate(self) -> None:
        """Ask the program to end."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()

    async def kill(self) -> None:
        """End the program at once."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def _watch(self) -> None:
        """End this process, and so the engine, when it has not been asked for long."""
        while self._unasked < ASKED_WITHIN:
            # Counted in looks, as a machine that was suspended shall not end what is asked after.
            await asyncio.sleep(LOOK_INTERVAL)
            self._unasked += LOOK_INTERVAL
        print(f"not asked by its supervisor for {ASKED_WITHIN:.0f} s: ends", flush=True)
        os._exit(1)
