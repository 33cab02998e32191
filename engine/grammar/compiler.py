"""Compiles grammars beside the engine's loop, and keeps those that were used last."""

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

from engine.grammar.mask_threads import Following
from engine.shared.fair_threads import FairExecutor
from engine.shared.grammar_spec import (
    BadGrammar,
    GrammarThreads,
    grammar_size,
    grammar_text,
)
from engine.shared.matchers import grammar_error, new_matcher
from engine.shared.messages import GrammarSpec

if TYPE_CHECKING:  # the library is loaded when the first grammar comes
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_CACHED = 32
"""Compiled grammars that are kept while no request uses them."""
MAX_CACHED_BYTES = 256 << 20
"""Bytes that these may take together; the newest one is kept in any case."""
MAX_HELD_BYTES = 1 << 30
"""What all compiled grammars may take together, those of requests included. While they take more,
those that nobody uses are forgotten, and no more are compiled."""
MAX_WAIT = 30.0
"""Seconds that a grammar waits until there is room for it."""
COMPILE_THREADS = 3
"""One of them is not for a tenant whose grammars the others compile."""
_MAX_WAITING = 1 << 20
"""Grammars that wait: far more than an engine has requests."""

_LOOK = 0.02
"""Seconds between looks at whether there is room."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_BYTES_PER_CHARACTER = 256
"""Estimate for a compiled grammar where nothing can be measured; usual are 0.1 to 100 times it."""
_MAX_COUNTED_BYTES = 128 << 20
"""What one grammar is taken to need at most: its states are limited, and what makes a process grow
beside it, like steps that touch their KV blocks for the first time, is not its own."""


class CannotCompile(Exception):
    """The grammar does not fit this engine's tokenizer; the message says why."""


class CompiledGrammar:
    """A grammar that is being compiled, has been, or cannot be.

    Whoever holds it keeps it from being compiled again.
    """

    __slots__ = (
        "__weakref__",
        "_done",
        "asked_at",
        "error",
        "following",
        "matcher",
        "no_room",
        "num_bytes",
        "spec",
    )

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.asked_at = time.monotonic()
        self.error: str | None = None
        """Why it cannot be compiled."""
        self.no_room = False
        """Whether it could be, were there more room."""
        self.matcher: LLMatcher | None = None
        """At the beginning of the grammar, to be copied; None until it is compiled."""
        self.num_bytes = 0
        """What the process grew by while it was compiled; known when it is settled."""
        self.following = Following()
        self._done = threading.Event()

    @property
    def settled(self) -> bool:
        """Whether it is known how the compilation ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is settled."""
        self._done.wait()

    def settle(
        self, matcher: "LLMatcher | None", error: str | None, *, no_room: bool = False
    ) -> None:
        """Note how the compilation ended."""
        self.matcher, self.error, self.no_room = matcher, error, no_room
        self._done.set()


class GrammarCompiler:
    """Compiles each grammar once for all requests that ask for it while it is in use or cached."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Make a compiler; it reads nothing before the first grammar comes.

        Args:
            tokenizer_file: the model's tokenizer.json.
            vocab_size: the model's, which may be padded beyond the tokenizer's.
            eos_token_ids: tokens that may be drawn where a grammar may end.
        """
        self.on_settled: Callable[[], None] = lambda: None
        """Called by another thread whenever a grammar that was asked for is settled."""
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
        """All compiled grammars in use or cached, also those that were forgotten."""
        self._num_hurried = 0
        """How many callers cannot go on before their grammar is settled."""
        self._closing = threading.Event()
        self._known: WeakValueDictionary[GrammarSpec, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._spelled: dict[str, tuple[int, ...]] = {}

    def ask(self, spec: GrammarSpec, tenant: int = 0) -> CompiledGrammar:
        """Return the grammar; if it is new, another thread compiles it in its tenant's turn."""
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
        """Return the grammar once it is settled, whether there is room for it or not."""
        grammar = self.ask(spec)
        self._num_hurried += 1
        try:
            grammar.wait()
        finally:
            self._num_hurried -= 1
        return grammar

    def forget(self, grammar: CompiledGrammar) -> None:
        """Have the grammar compiled anew for the next request that asks for it."""
        with self._lock:
            if self._known.get(grammar.spec) is grammar:
                del self._known[grammar.spec]
            if self._recent.get(grammar.spec) is grammar:
                del self._recent[grammar.spec]

    def new_matcher(self, spec: GrammarSpec) -> "LLMatcher":
        """Compile a grammar here and now, for one user.

        Raises:
            CannotCompile: it does not fit.
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
        """Return the tokenizer as the library takes it, read at the first call.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not fit the model.
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
        """Return the tokens that spell a text, special ones as such; remembered.

        Raises:
            OSError, ValueError: as `tokenizer`.
        """
        found = self._spelled.get(text)
        if found is None:
            found = tuple(self.tokenizer().tokenize_str(text, parse_special=True))
            if len(self._spelled) == MAX_CACHED:
                self._spelled.clear()
            self._spelled[text] = found
        return found

    @property
    def num_cached(self) -> int:
        """Grammars that are kept, in use or not."""
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

    def _finds_room(self, grammar: CompiledGrammar) -> bool:
        """Wait for room while other grammars take too much; whether there is some in time."""
        while not (self._has_room() or self._num_hurried or self._closing.wait(_LOOK)):
            if time.monotonic() - grammar.asked_at > MAX_WAIT:
                return False
        return True

    def _has_room(self) -> bool:
        """Whether one more may be compiled; forgets what nobody uses if there is need."""
        if self.held_bytes <= MAX_HELD_BYTES:
            return True
        with self._lock:
            self._recent.clear()
        return self.held_bytes <= MAX_HELD_BYTES

    @property
    def held_bytes(self) -> int:
        """What all compiled grammars take, in use or cached."""
        with self._lock:
            return sum(each.num_bytes for each in self._held)

    def _compile(self, grammar: CompiledGrammar) -> None:
        matcher, error, before, no_room = None, None, 0, False
        try:
            no_room = not self._finds_room(grammar)
            if no_room:
                error = (
                    f"the grammar was not compiled within {MAX_WAIT:.0f} s: those of other "
                    "requests take all the memory that there is for grammars; try again later"
                )
            else:
                before = _resident_bytes()
                matcher = self.new_matcher(grammar.spec)
        except CannotCompile as reason:
            error = str(reason)
        except Exception:  # whatever it is, somebody waits for the grammar
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
    """Return a tokenizer.json with the tokens that only the tokenizer_config.json beside it has.

    Raises:
        OSError: it cannot be read.
        ValueError: one of the files is not what it should be.
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
    """Return what the process holds in memory; 0 where that cannot be told."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/self/statm", encoding="ascii") as file,
    ):
        return int(file.read().split()[1]) * _PAGE
    return 0
