"""An actor on a node of a Ray cluster: starts a program there and reports to the supervisor.

The engine is a child process of the actor, the same `python -m engine` as on a plain node, for
three reasons. Ray takes over the signals and threads of an actor's process. If an engine dies, its
actor survives to report how. And the lifeline between the two closes when either exits: however an
actor ends (killed, with its raylet, with the driver's job), its engine exits within
`engine.shared.lifeline.ORPHAN_GRACE` seconds, as every orphan does.

A supervisor polls for events. An actor that is not polled exits, whether or not Ray knows that its
supervisor is gone.

The class is pickled by value and imports nothing of this project before it has reported the version
installed on its node; so a node with another version, or none, is refused with a clear error.
"""

import asyncio
import contextlib
import importlib
import os
import sys
from importlib import metadata
from typing import Any

POLL_TIMEOUT = 15.0
"""Seconds without a call from the supervisor after which an actor exits."""

MAX_POLL_WAIT = 3.0
"""Maximum seconds for which a poll for events waits."""

CHECK_INTERVAL = 1.0
"""Seconds between checks for the supervisor's last call."""


class EngineActor:
    """Runs one engine, or API server, on this node for a supervisor elsewhere.

    Methods take and return bytes, defined in `server.fleet.ray.messages`.
    """

    def __init__(self, driver_directory: str = "") -> None:
        """`driver_directory`: the supervisor's current directory.

        Ray prepends it to the module search path, where a model directory's server.py would shadow
        ours.
        """
        with contextlib.suppress(ValueError):
            sys.path.remove(driver_directory)
        self._idle_seconds = 0.0
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._events: list[Any] = []
        self._lines = 0
        self._has_events = asyncio.Event()
        self._child: Any = None

    async def installed(self) -> dict[str, str]:
        """Return the installed versions on this node, and the actor's pid."""
        self._idle_seconds = 0.0
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
        """Start the program; `events` then reports its state.

        Raises:
            OSError: it cannot be started.
        """
        from server.fleet.ray.relay import start_program

        self._idle_seconds = 0.0
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
        self._has_events.set()

    async def events(self) -> bytes:
        """Return pending events; an empty list after `MAX_POLL_WAIT` seconds without any."""
        import msgspec

        self._idle_seconds = 0.0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_events.wait(), MAX_POLL_WAIT)
        self._has_events.clear()
        events, self._events, self._lines = self._events, [], 0
        return msgspec.msgpack.encode(events)

    async def terminate(self) -> None:
        """Send the program SIGTERM."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()

    async def kill(self) -> None:
        """Kill the program."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def _watch(self) -> None:
        """Exit this process, and so the engine, when the supervisor has stopped polling."""
        while self._idle_seconds < POLL_TIMEOUT:
            # Counted in checks instead of time, so that suspending the machine does not end it.
            await asyncio.sleep(CHECK_INTERVAL)
            self._idle_seconds += CHECK_INTERVAL
        print(f"no call from its supervisor for {POLL_TIMEOUT:.0f} s: exiting", flush=True)
        os._exit(1)
