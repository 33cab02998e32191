"""Checks whether engines can enforce a grammar, off the event loop, with cached results.

The cost of a check is not known in advance, and the library cannot be interrupted. So grammars are
checked in processes that can be killed. These run at low priority, which a thread of this process
must not: it could be preempted while holding the GIL.
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
from server.generate.grammar_process import NOTHING, Check, GrammarText, JobResult
from server.generate.structural_tags import StructuralTag, lark_from_tag
from server.helper_process import HelperProcess
from server.limits import MAX_CHECK_SECONDS

logger = logging.getLogger(__name__)

CHECK_THREADS = 2
_PROCESS = "server.generate.grammar_process"
_MAX_WAIT = 30.0
"""Wall-clock limit in seconds for a check: its process may get little processor time."""
MAX_REMEMBERED = 4096
"""Maximum cached results, keyed by digest of the grammar."""


class GrammarCheck:
    """Checks grammars off the event loop, and caches the results."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are the texts of tokens that Lark grammars can refer to as `<...>`."""
        self._special_tokens = tuple(special_tokens)
        threads = ThreadPoolExecutor(CHECK_THREADS, "grammar check")
        self._checks = FairExecutor(threads.submit, CHECK_THREADS)
        self._processes = queue.SimpleQueue[HelperProcess]()
        for _ in range(CHECK_THREADS):
            self._processes.put(HelperProcess(_PROCESS, NOTHING))
        self._run_job: OrderedDict[bytes, str | None] = OrderedDict()

    async def require(
        self, grammar: GrammarSpec | GrammarText | StructuralTag, param: str, tenant: int = 0
    ) -> GrammarSpec:
        """Check that engines can enforce a grammar; return it in the engines' form.

        Args:
            param: the field that it came from.
            tenant: ID of its tenant; checks are scheduled fairly between tenants.

        Raises:
            ApiError: it cannot be enforced, or it cannot be checked now.
        """
        try:
            spec = await self._spec(grammar, param, tenant)
            digest = blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()
            if digest in self._run_job:
                self._run_job.move_to_end(digest)
            else:
                check = self._checks.submit(tenant, self._job, Check(spec, self._special_tokens))
                self._run_job[digest] = (await asyncio.wrap_future(check)).error
                if len(self._run_job) > MAX_REMEMBERED:
                    self._run_job.popitem(last=False)
        except QueueFull:
            raise unavailable(
                "Too many grammars are waiting to be checked; try again later."
            ) from None
        except OSError as error:
            logger.warning("cannot check grammars: %s", error)
            raise unavailable("Grammars cannot be checked now; try again later.") from error
        reason = self._run_job[digest]
        if reason is not None:
            raise invalid_field(param, reason)
        return spec

    async def _spec(
        self, grammar: GrammarSpec | GrammarText | StructuralTag, param: str, tenant: int
    ) -> GrammarSpec:
        """Return a grammar in the engines' form, without checking that it can be enforced."""
        match grammar:
            case GrammarText():
                conversion = self._checks.submit(tenant, self._job, grammar)
                result = await asyncio.wrap_future(conversion)
                if result.error is not None:
                    raise invalid_field(param, result.error)
                return LarkGrammar(result.lark)
            case StructuralTag():
                converted = self._checks.submit(
                    tenant, lark_from_tag, grammar, self._special_tokens
                )
            case _:
                return grammar
        try:
            return LarkGrammar(await asyncio.wrap_future(converted))
        except BadGrammar as error:
            raise invalid_field(param, str(error)) from error

    def _job(self, job: Check | GrammarText) -> JobResult:
        process = self._processes.get()
        try:
            answer = process.answer(msgspec.msgpack.encode(job), _MAX_WAIT)
        finally:
            self._processes.put(process)
        if answer is None:
            return JobResult(
                f"the grammar takes more than {MAX_CHECK_SECONDS:g} s of processor time, or too "
                "much memory, to check; make it simpler"
            )
        return msgspec.msgpack.decode(answer, type=JobResult)
