"""Compiles grammars in background threads, with a cache of recently used ones."""

import contextlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from engine.grammar.mask_threads import GrammarState
from engine.shared.fair_threads import FairExecutor
from engine.shared.grammar_spec import (
    BadGrammar,
    GrammarThreads,
    grammar_size,
    grammar_text,
)
from engine.shared.matchers import grammar_error, new_matcher
from engine.shared.messages import GrammarSpec

if TYPE_CHECKING:  # the library is loaded for the first grammar
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_CACHED = 32
"""Maximum cached grammars."""
MAX_CACHED_BYTES = 256 << 20
"""Maximum bytes of cached grammars; the newest one is kept in any case."""
MAX_HELD_BYTES = 1 << 30
"""Maximum bytes of all compiled grammars, including those of requests. Above it, unused ones are
dropped, and none are compiled."""
MAX_WAIT = 30.0
"""Seconds that a grammar waits for memory."""
COMPILE_THREADS = 3
"""One of them is reserved for tenants without a running compilation."""
_MAX_WAITING = 1 << 20
"""Effectively unlimited: far above an engine's number of requests."""

_POLL_INTERVAL = 0.02
"""Seconds between checks for memory."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_BYTES_PER_CHARACTER = 256
"""Minimum estimate per compiled grammar; typical sizes are 0.1 to 100 times it."""
_MAX_COUNTED_BYTES = 128 << 20
"""Maximum size attributed to one grammar: its states are limited, and other growth of the process
meanwhile, such as steps that touch KV blocks for the first time, is not its own."""


class CannotCompile(Exception):
    """The grammar does not work with this engine's tokenizer; the message says why."""


class CompiledGrammar:
    """A grammar that is being compiled, has been compiled, or failed to compile.

    References to it keep it in the compiler's index.
    """

    __slots__ = (
        "__weakref__",
        "_done",
        "error",
        "matcher",
        "no_room",
        "num_bytes",
        "requested_at",
        "spec",
        "state",
    )

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.requested_at = time.monotonic()
        self.error: str | None = None
        """Why compilation failed."""
        self.no_room = False
        """Whether it failed only for lack of memory."""
        self.matcher: LLMatcher | None = None
        """Matcher in its initial state, to be copied; None until compiled."""
        self.num_bytes = 0
        """Growth of the process during compilation; set when settled."""
        self.state = GrammarState()
        self._done = threading.Event()

    @property
    def settled(self) -> bool:
        """Whether the compilation has ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is settled."""
        self._done.wait()

    def settle(
        self, matcher: "LLMatcher | None", error: str | None, *, no_room: bool = False
    ) -> None:
        """Record the outcome of the compilation."""
        self.matcher, self.error, self.no_room = matcher, error, no_room
        self._done.set()


class GrammarCompiler:
    """Compiles each grammar once for all requests that use it while it is in use or cached."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Make a compiler; nothing is read before the first grammar.

        Args:
            tokenizer_file: the model's tokenizer.json.
            vocab_size: the model's, which may be padded beyond the tokenizer's.
            eos_token_ids: tokens that are allowed where a grammar can end.
        """
        self.on_settled: Callable[[], None] = lambda: None
        """Called from another thread whenever a requested grammar is settled."""
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._threads = GrammarThreads(COMPILE_THREADS, "grammar")
        self._queue = FairExecutor(
            self._threads.submit,
            COMPILE_THREADS,
            max_waiting=_MAX_WAITING,
            max_of_tenant=_MAX_WAITING,
        )
        self._held: WeakSet[CompiledGrammar] = WeakSet()
        """All compiled grammars in use or cached, including those dropped from the index."""
        self._num_blocked = 0
        """Number of callers that are blocked until their grammar is settled."""
        self._closing = threading.Event()
        self._known: WeakValueDictionary[GrammarSpec, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._token_cache: dict[str, tuple[int, ...]] = {}

    def request(self, spec: GrammarSpec, tenant: int = 0) -> CompiledGrammar:
        """Return the grammar; a new one is queued for compilation, fairly between tenants."""
        with self._lock:
            grammar = self._known.get(spec)
            if grammar is None:
                grammar = self._known[spec] = CompiledGrammar(spec)
                self._queue.submit(tenant, self._compile, grammar)
            self._recent[spec] = grammar
            self._recent.move_to_end(spec)
            self._forget_oldest()
        return grammar

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the grammar once it is settled; does not wait for memory."""
        grammar = self.request(spec)
        self._num_blocked += 1
        try:
            grammar.wait()
        finally:
            self._num_blocked -= 1
        return grammar

    def forget(self, grammar: CompiledGrammar) -> None:
        """Drop the grammar, so that the next request for it compiles it again."""
        with self._lock:
            if self._known.get(grammar.spec) is grammar:
                del self._known[grammar.spec]
            if self._recent.get(grammar.spec) is grammar:
                del self._recent[grammar.spec]

    def new_matcher(self, spec: GrammarSpec) -> "LLMatcher":
        """Compile a grammar synchronously, uncached.

        Raises:
            CannotCompile: it is invalid, or does not work with the tokenizer.
        """
        try:
            matcher = new_matcher(self.tokenizer(), grammar_text(spec))
        except (BadGrammar, ValueError, OSError) as error:
            raise CannotCompile(f"the grammar cannot be compiled: {error}") from error
        reason = grammar_error(matcher)
        if reason is not None:
            raise CannotCompile(f"the grammar cannot be compiled: {reason}")
        return matcher

    def tokenizer(self) -> "LLTokenizer":
        """Return the tokenizer in the library's form, loaded on the first call.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not match the model.
        """
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokenizer is None:
                text = _with_added_tokens(self._file)
                self._tokenizer = LLTokenizer(
                    text, n_vocab=self._vocab_size, eos_token=self._eos or None
                )
            return self._tokenizer

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """Tokenize a text, with special tokens recognized; cached.

        Raises:
            OSError, ValueError: as `tokenizer`.
        """
        found = self._token_cache.get(text)
        if found is None:
            found = tuple(self.tokenizer().tokenize_str(text, parse_special=True))
            if len(self._token_cache) == MAX_CACHED:
                self._token_cache.clear()
            self._token_cache[text] = found
        return found

    @property
    def num_cached(self) -> int:
        """Number of indexed grammars, in use or not."""
        return len(self._known)

    def shutdown(self) -> None:
        """Stop compiling; idempotent."""
        self._closing.set()
        self._threads.shutdown()

    def _forget_oldest(self) -> None:
        total = sum(each.num_bytes for each in self._recent.values())
        while len(self._recent) > MAX_CACHED or (
            total > MAX_CACHED_BYTES and len(self._recent) > 1
        ):
            _, oldest = self._recent.popitem(last=False)
            total -= oldest.num_bytes

    def _wait_for_memory(self, grammar: CompiledGrammar) -> bool:
        """Wait until memory is below the limit; return whether it was in time."""
        while not (
            self._is_below_limit() or self._num_blocked or self._closing.wait(_POLL_INTERVAL)
        ):
            if time.monotonic() - grammar.requested_at > MAX_WAIT:
                return False
        return True

    def _is_below_limit(self) -> bool:
        """Return whether memory is below the limit, dropping unused grammars if necessary."""
        if self.held_bytes <= MAX_HELD_BYTES:
            return True
        with self._lock:
            self._recent.clear()
        return self.held_bytes <= MAX_HELD_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of all compiled grammars, in use or cached."""
        with self._lock:
            return sum(each.num_bytes for each in self._held)

    def _compile(self, grammar: CompiledGrammar) -> None:
        matcher, error, before, no_room = None, None, 0, False
        try:
            no_room = not self._wait_for_memory(grammar)
            if no_room:
                error = (
                    f"the grammar was not compiled within {MAX_WAIT:.0f} s: other "
                    "requests' grammars use all the memory for grammars; try again later"
                )
            else:
                before = _resident_bytes()
                matcher = self.new_matcher(grammar.spec)
        except CannotCompile as reason:
            error = str(reason)
        except Exception:  # must settle in any case: requests wait for the grammar
            logger.exception("a grammar could not be compiled")
            error = "the grammar could not be compiled"
        least = _BYTES_PER_CHARACTER * grammar_size(grammar.spec)
        grown = _resident_bytes() - before
        grammar.num_bytes = max(least, min(grown, _MAX_COUNTED_BYTES))
        if error is not None:
            self.forget(grammar)
        else:
            with self._lock:
                self._held.add(grammar)
                self._forget_oldest()
        grammar.settle(matcher, error, no_room=no_room)
        self.on_settled()


def _with_added_tokens(file: Path) -> str:
    """Return tokenizer.json with the added tokens that only tokenizer_config.json contains.

    Raises:
        OSError: it cannot be read.
        ValueError: one of the files is malformed.
    """
    text, config_file = file.read_text(encoding="utf-8"), file.with_name("tokenizer_config.json")
    if not config_file.is_file():
        return text
    described = json.loads(config_file.read_bytes()).get("added_tokens_decoder") or {}
    tokenizer = json.loads(text) if described else {}
    added = tokenizer.get("added_tokens") or []
    known = {token["id"] for token in added}
    more = [
        {**_ADDED_TOKEN, **token, "id": int(number)}
        for number, token in sorted(described.items(), key=lambda each: int(each[0]))
        if int(number) not in known
    ]
    return json.dumps({**tokenizer, "added_tokens": added + more}) if more else text


_ADDED_TOKEN = {
    "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False,
}  # fmt: skip


def _resident_bytes() -> int:
    """Return the process's resident memory; 0 if unknown."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/self/statm", encoding="ascii") as file,
    ):
        return int(file.read().split()[1]) * _PAGE
    return 0
