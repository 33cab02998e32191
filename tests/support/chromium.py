"""Drives a headless Chromium over its debugging pipe, to test pages as users see them.

Commands of the Chrome DevTools Protocol are sent as zero-terminated JSON over file descriptors 3
and 4 of the browser: no port is opened.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

import pytest

from server.fleet.local_server import stop_process
from tests.support.waiting import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

_LAUNCHER = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Moves the pipes to the descriptors that the browser expects, then executes it."""

_POLL_SECONDS = 0.05


class BrowserError(Exception):
    """The browser did not start or respond, or a script failed in it."""


def find() -> str | None:
    """Return the path of a Chromium; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    find() is None, reason="no Chromium is installed (apt install chromium)"
)


class Browser:
    """One browser process with one page, as a context manager."""

    def __init__(self, program: str) -> None:
        self.console: list[str] = []
        """Console messages of the page, and what its security policy etc. blocked."""
        self._program = program
        self._last_id = 0
        self._session: str | None = None
        self._unread = b""

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory(
            prefix="swell-browser-", ignore_cleanup_errors=True
        )
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        command = [
            self._program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox",
            "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={self._profile.name}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCHER, str(from_us), str(to_us), *command],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": self._profile.name},
        )
        os.close(from_us)
        os.close(to_us)
        try:
            target = self._call("Target.createTarget", {"url": "about:blank"})
            attached = self._call(
                "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
            )
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable", {})
        except BaseException:
            self._close()
            raise
        return self

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page with this viewport size and colour scheme.

        The previous page is left first, so that its late messages, e.g. about a stopped server, do
        not appear in the new page's console.

        Raises:
            BrowserError: the page does not load.
        """
        self._call("Page.navigate", {"url": "about:blank"})
        self.wait_until("location.href === 'about:blank'")
        self.console.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})
        answer = self._call("Page.navigate", {"url": url})
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page.

        Raises:
            BrowserError: the expression threw an exception.
        """
        answer = self._call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, text: str) -> None:
        """Type a text at the focused element; "\\r" is Enter."""
        for character in text:
            pressed = {"text": character, "key": "Enter" if character == "\r" else character}
            if character == "\r":
                pressed["code"] = "Enter"
            self._call("Input.dispatchKeyEvent", {"type": "keyDown", **pressed})
            self._call("Input.dispatchKeyEvent", {"type": "keyUp", "key": pressed["key"]})

    def wait_until(self, script: str, timeout: float = PATIENCE) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            BrowserError: it was not true within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.run(script):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise BrowserError(f"not within {timeout} s: {script}\n{self.console}\n{text}")
            time.sleep(_POLL_SECONDS)

    def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"{self._program} ended") from None
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline: float, method: str) -> Any:
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            if not readable:
                raise BrowserError(f"no answer to {method}")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise BrowserError(f"{self._program} ended")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.console.append(parameters["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.console.append(str([each.get("value") for each in parameters["args"]]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))

    def _close(self) -> None:
        os.close(self._write)
        stop_process(self._process, 10)
        os.close(self._read)
        self._profile.cleanup()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
