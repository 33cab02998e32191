"""The supervisor's side of a template: starts it, asks it for processes, ends it.

It is there for the first processes of a node, which start together. Once they are forked it is
ended, so that it holds no memory; what is started later loads its libraries itself. So does what
cannot be forked, for whatever reason.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable

import msgspec

from engine.shared.config import EngineConfig
from engine.shared.messages import ChildReady, ChildStatus
from engine.shared.template import FORK, LONGEST_ANSWER, Answer, TemplateLaunch
from server.fleet.child import LONGEST_LOG_LINE, Child
from server.fleet.forking.forked_process import ForkedProcess, taking_in_orphans
from server.fleet.holder import Program

logger = logging.getLogger(__name__)

LOAD_TIMEOUT = 60.0
"""Seconds in which a template has to load; to load the libraries twice is better than to wait."""

ANSWER_TIMEOUT = 5.0
"""Seconds in which a template has to fork; the supervisor does nothing else meanwhile."""


class CannotFork(Exception):
    """A template has not forked what it was asked for."""


class Template:
    """One template process."""

    def __init__(self, connection: socket.socket, forks: int) -> None:
        connection.settimeout(ANSWER_TIMEOUT)
        self._forks_left = forks
        self._connection = connection
        self._child: Child | None = None
        self._ended: asyncio.Task[None] | None = None
        self._usable = False
        self._decided = asyncio.Event()
        """Whether it is usable is known: it has loaded, or never will."""

    @classmethod
    async def begin(
        cls,
        program: Program,
        engine: EngineConfig | None,
        forks: int,
        on_line: Callable[[str], None],
    ) -> "Template":
        """Start one, which loads its libraries while the caller goes on.

        Args:
            program: its module, and what its forks inherit; its launch is made here.
            engine: settings of the engines that will be forked, if it is theirs.
            forks: how many there will be, after which it ends.
            on_line: called for every line that it prints.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        template = cls(ours, forks)
        with theirs:
            launch = TemplateLaunch(program.name, theirs.fileno(), engine)
            inherit = [*program.inherit, theirs.fileno()]
            try:
                child = await Child.start(
                    msgspec.structs.replace(program, launch=launch, inherit=inherit),
                    on_status=template._on_status,
                    on_line=on_line,
                )
            except OSError as error:
                logger.warning("there is no %s: %s", program.name, error)
                template._decide(usable=False)
                return template
        template._child = child
        template._ended = asyncio.create_task(template._follow(child))
        return template

    @property
    def pid(self) -> int:
        """Its process id; 0 if it does not run."""
        return self._child.pid if self._child is not None and self._child.alive else 0

    async def start(
        self,
        program: Program,
        *,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> Child:
        """Fork a program's process, or else start it as ever: a `Starter`.

        Raises:
            OSError: the process cannot be created.
        """
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                await self._decided.wait()
        except TimeoutError:
            logger.warning("%s loads its libraries itself: a template takes too long", program.name)
            self._give_up()
        if self._usable:
            try:
                child = await self._fork(program.name)
            except CannotFork as error:
                logger.warning("%s loads its libraries itself: %s", program.name, error)
                self._give_up()
            else:
                child.follow(program.launch, on_status, on_line)
                self._forks_left -= 1
                if not self._forks_left:
                    self._give_up()
                return child
        return await Child.start(program, on_status=on_status, on_line=on_line)

    async def close(self) -> None:
        """End it, and wait until it has ended. What it has forked does not notice."""
        self._give_up()
        if self._ended is not None:
            await self._ended

    def _on_status(self, status: ChildStatus) -> None:
        if isinstance(status, ChildReady) and not self._decided.is_set():
            self._decide(usable=True)

    async def _follow(self, child: Child) -> None:
        end = await child.wait()
        if not self._decided.is_set():
            logger.warning("%s %s before it could be used", child.name, end.how)
        self._decide(usable=False)

    def _decide(self, *, usable: bool) -> None:
        self._usable = usable
        self._decided.set()

    def _give_up(self) -> None:
        self._decide(usable=False)
        self._connection.close()
        if self._child is not None:
            self._child.kill()  # it has nothing to put in order

    async def _fork(self, name: str) -> Child:
        """Fork a process for a program.

        Raises:
            CannotFork: the template did not.
            OSError: there are no descriptors left.
        """
        ours, theirs = socket.socketpair()
        try:
            output, its_output = os.pipe()
            try:
                pid = self._ask([theirs.fileno(), its_output])
                process = ForkedProcess(pid)
            except BaseException:
                os.close(output)
                raise
            finally:
                os.close(its_output)
        except BaseException:
            ours.close()  # which ends whatever was forked nevertheless
            raise
        finally:
            theirs.close()
        try:
            await process.read_from(output, LONGEST_LOG_LINE)
        except BaseException:
            process.send_signal(signal.SIGKILL)
            ours.close()
            raise
        return Child(name, process, ours)

    def _ask(self, descriptors: list[int]) -> int:
        try:
            with taking_in_orphans():
                socket.send_fds(self._connection, [FORK], descriptors)
                data = self._connection.recv(LONGEST_ANSWER)
            answer = msgspec.msgpack.decode(data, type=Answer)
        except (OSError, msgspec.DecodeError) as error:
            raise CannotFork(f"the template does not answer: {error or repr(error)}") from error
        if not answer.pid:
            raise CannotFork(answer.refusal)
        try:
            os.waitid(os.P_PID, answer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # below something that takes in orphans itself
            raise CannotFork("its fork has not become a child of the supervisor") from None
        return answer.pid
