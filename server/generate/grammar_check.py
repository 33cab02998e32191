"""Whether engines can enforce a grammar, checked outside the event loop and remembered.

The cost of a check is only known afterwards, and the library cannot be interrupted: grammars are
checked in processes that can be killed. They have a low priority, which a thread of this process
must not have: it would keep the interpreter while it waits for a processor.
"""

import asyncio
import logging
import queue
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import msgspec

from engine.shared.fair_threads import FairExecutor, QueueFull
from engine.shared.grammar_spec import BadGrammar
from engine.shared.messages import GrammarSpec, LarkGrammar
from server.errors import invalid_field, unavailable
from server.generate.grammar_process import NOTHING, Check, Found, GrammarText
from server.generate.structural_tags import StructuralTag, lark_from_tag
from server.helper_process import HelperProcess
from server.limits import MAX_CHECK_SECONDS

logger = logging.getLogger(__name__)

CHECK_THREADS = 2
_PROCESS = "server.generate.grammar_process"
_MAX_WAIT = 30.0
"""Seconds after which a process is ended in any case: others may keep it from its processor."""
MAX_REMEMBERED = 4096
"""Grammars whose check is not repeated; only their digests are kept."""


class GrammarCheck:
    """Checks grammars beside the event loop, and remembers what it found."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are the texts of tokens that Lark grammars may name as `<...>`."""
        self._special_tokens = tuple(special_tokens)
        threads = ThreadPoolExecutor(CHECK_THREADS, "grammar check")
        self._checks = FairExecutor(threads.submit, CHECK_THREADS)
        self._processes = queue.SimpleQueue[HelperProcess]()
        for _ in range(CHECK_THREADS):
            self._processes.put(HelperProcess(_PROCESS, NOTHING))
        self._found: OrderedDict[bytes, str | None] = OrderedDict()

    async def require(
        self, wanted: GrammarSpec | GrammarText | StructuralTag, param: str, tenant: int = 0
    ) -> GrammarSpec:
        """Check that engines can enforce a grammar; return it as they take it.

        Args:
            wanted: the grammar.
            param: the field that it came from.
            tenant: whose it is: tenants take turns.

        Raises:
            ApiError: they cannot, or it cannot be checked now.
        """
        try:
            spec = await self._spec(wanted, param, tenant)
            digest = blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()
            if digest in self._found:
                self._found.move_to_end(digest)
            else:
                check = self._checks.submit(tenant, self._job, Check(spec, self._special_tokens))
                self._found[digest] = (await asyncio.wrap_future(check)).error
                if len(self._found) > MAX_REMEMBERED:
                    self._found.popitem(last=False)
        except QueueFull:
            raise unavailable(
                "Too many grammars are waiting to be checked; try again later."
            ) from None
        except OSError as error:
            logger.warning("cannot check grammars: %s", error)
            raise unavailable("Grammars cannot be checked now; try again later.") from error
        reason = self._found[digest]
        if reason is not None:
            raise invalid_field(param, reason)
        return spec

    async def _spec(
        self, wanted: GrammarSpec | GrammarText | StructuralTag, param: str, tenant: int
    ) -> GrammarSpec:
        """Return a grammar in a form that engines take; they may not be able to enforce it."""
        match wanted:
            case GrammarText():
                conversion = self._checks.submit(tenant, self._job, wanted)
                result = await asyncio.wrap_future(conversion)
                if result.error is not None:
                    raise invalid_field(param, result.error)
                return LarkGrammar(result.lark)
            case StructuralTag():
                converted = self._checks.submit(tenant, lark_from_tag, wanted, self._special_tokens)
            case _:
                return wanted
        try:
            return LarkGrammar(await asyncio.wrap_future(converted))
        except BadGrammar as error:
            raise invalid_field(param, str(error)) from error

    def _job(self, job: Check | GrammarText) -> Found:
        process = self._processes.get()
        try:
            answer = process.answer(msgspec.msgpack.encode(job), _MAX_WAIT)
        finally:
            self._processes.put(process)
        if answer is None:
            return Found(
                f"the grammar takes more than {MAX_CHECK_SECONDS:g} s of processor time, or too "
                "much memory, to check; make it simpler"
            )
        return msgspec.msgpack.decode(answer, type=Found)
