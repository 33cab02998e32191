"""A server that a command such as run-batch or chat starts for itself and stops at its end."""

import re
import subprocess
import sys
import threading
from collections import deque
from typing import Any, Self

from engine.shared.config import Section
from engine.shared.settings import changes_of, settings_of
from server.config import ServeConfig

_READY = re.compile(r"swell is ready after [\d.]+ s: (https?://\S+)")
_PROGRAM = "server.local_server_main"
_STOP_TIMEOUT = 30.0


class ServerFailed(Exception):
    """The server did not become ready; the message contains its last output."""


def serve_arguments(config: Section) -> list[str]:
    """Return arguments of `swell serve` for the settings that a command shares with it.

    Settings at their defaults are left out.
    """
    arguments: list[str] = []
    known = {(setting.section, setting.name) for setting in settings_of(ServeConfig)}
    for setting, value in changes_of(config):
        if (setting.section, setting.name) not in known:
            continue
        if setting.name == "model":
            arguments.insert(0, value)
        elif setting.is_bool:
            arguments.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif setting.is_list:
            arguments += [setting.flag, *map(str, value)]
        else:
            arguments += [setting.flag, str(value)]
    return arguments


def stop_process(process: subprocess.Popen[Any], timeout: float) -> None:
    """Terminate a process; kill it if it has not exited after `timeout` seconds."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class LocalServer:
    """`swell serve` on a local port, as a context manager; port 0 selects a free one."""

    def __init__(self, arguments: list[str], startup_timeout: float, port: int = 0) -> None:
        self._arguments = [*arguments, "--port", str(port)]
        self._timeout = startup_timeout
        self._lines: deque[str] = deque(maxlen=30)
        self._ready = threading.Event()
        self.url = ""

    def __enter__(self) -> Self:
        """Start it and wait until it is ready.

        Raises:
            ServerFailed: it does not become ready.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, "serve", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the server
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._ready.wait(self._timeout)
            if not self.url:
                raise ServerFailed("the server did not start:\n" + "\n".join(self._lines))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            if found := _READY.search(line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def __exit__(self, *_: object) -> None:
        stop_process(self._process, _STOP_TIMEOUT)
        self._reader.join(_STOP_TIMEOUT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
