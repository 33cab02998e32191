"""Chat templates that requests bring along, rendered in a process that can be ended."""

import asyncio
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from server.access.limits import MAX_TEMPLATE_SECONDS
from server.text.chat_template import TemplateFailed
from server.text.template_process import LENGTH, Job, Rendered, Rendering, frame

_START_SECONDS = 30.0


class RequestTemplates:
    """Renders one template after the other; the process is started for the first."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names such as `bos_token` to text, for all templates."""
        self._special_tokens = dict(special_tokens)
        self._thread = ThreadPoolExecutor(1, "request templates")
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: Callable[[], object] = lambda: None

    async def render(self, source: str, attempts: Sequence[Rendering]) -> str:
        """Return what a template makes of the first conversation that it accepts.

        Raises:
            TemplateFailed: it is no template, accepts none, or takes too much time or memory.
        """
        job = msgspec.msgpack.encode(Job(source, self._special_tokens, list(attempts)))
        rendered = await asyncio.wrap_future(self._thread.submit(self._answered, frame(job)))
        if rendered.error:
            raise TemplateFailed(rendered.error)
        return rendered.text

    def _answered(self, job: bytes) -> Rendered:
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        answer = _exchange(self._process, job, MAX_TEMPLATE_SECONDS)
        if answer is None:
            self._ending()
            self._process = None
            return Rendered(error=f"it took more than {MAX_TEMPLATE_SECONDS:g} seconds, or memory")
        return msgspec.msgpack.decode(answer, type=Rendered)

    def _started(self) -> subprocess.Popen[bytes]:
        """Return a process that has read all that it needs, and ends with this object."""
        process = _start()
        self._ending = weakref.finalize(self, _end, process)
        _exchange(process, frame(msgspec.msgpack.encode(Job("", {}, []))), _START_SECONDS)
        return process


def _exchange(process: subprocess.Popen[bytes], sent: bytes, seconds: float) -> bytes | None:
    """Return what the process answers; None if it ends, or takes longer."""
    assert process.stdin is not None
    assert process.stdout is not None
    reads, writes = process.stdout.fileno(), process.stdin.fileno()
    end, answer, left = time.monotonic() + seconds, bytearray(), memoryview(sent)
    while (wait := end - time.monotonic()) > 0:
        readable, writable, _ = select.select([reads], [writes] if left else [], [], wait)
        try:
            if writable:
                left = left[os.write(writes, left[: select.PIPE_BUF]) :]
            if readable:
                part = os.read(reads, 1 << 16)
                if not part:
                    return None
                answer += part
        except BrokenPipeError:
            return None
        if len(answer) >= LENGTH.size + (LENGTH.unpack_from(answer)[0] if answer else 0):
            return bytes(answer[LENGTH.size :])
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "server.text.template_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # and none of the secrets
        bufsize=0,
        start_new_session=True,
    )
