"""Compiles grammars beside the engine's loop, and keeps those that were used last."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from engine.shared.grammar_spec import (
    BadGrammar,
    GrammarThreads,
    grammar_error,
    grammar_text,
    new_matcher,
)
from engine.shared.messages import GrammarSpec

if TYPE_CHECKING:  # the library is loaded when the first grammar comes
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_CACHED = 32
"""Compiled grammars that are kept while no request uses them."""
COMPILE_THREADS = 2


class CannotCompile(Exception):
    """The grammar does not fit this engine's tokenizer; the message says why."""


class CompiledGrammar:
    """A grammar that is being compiled, has been, or cannot be.

    Whoever holds it keeps it from being compiled again.
    """

    __slots__ = ("__weakref__", "_done", "error", "matcher", "spec")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.error: str | None = None
        """Why it cannot be compiled."""
        self.matcher: LLMatcher | None = None
        """At the beginning of the grammar, to be copied; None until it is compiled."""
        self._done = threading.Event()

    @property
    def settled(self) -> bool:
        """Whether it is known how the compilation ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is settled."""
        self._done.wait()

    def settle(self, matcher: "LLMatcher | None", error: str | None) -> None:
        """Note how the compilation ended."""
        self.matcher, self.error = matcher, error
        self._done.set()


class GrammarCompiler:
    """Compiles each grammar once for all requests that ask for it while it is in use or cached."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Nothing is read before the first grammar comes.

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
        self._known: WeakValueDictionary[GrammarSpec, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._spelled: dict[str, tuple[int, ...]] = {}

    def ask(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the grammar; if it is new, another thread begins to compile it."""
        with self._lock:
            grammar = self._known.get(spec)
            if grammar is None:
                grammar = self._known[spec] = CompiledGrammar(spec)
                self._threads.submit(self._compile, grammar)
            self._keep(grammar)
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
                text = self._file.read_text(encoding="utf-8")
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
        self._threads.shutdown()

    def _keep(self, grammar: CompiledGrammar) -> None:
        self._recent[grammar.spec] = grammar
        self._recent.move_to_end(grammar.spec)
        while len(self._recent) > MAX_CACHED:
            self._recent.popitem(last=False)

    def _compile(self, grammar: CompiledGrammar) -> None:
        matcher, error = None, None
        try:
            matcher = self.new_matcher(grammar.spec)
        except CannotCompile as reason:
            error = str(reason)
        except Exception:  # whatever it is, somebody waits for the grammar
            logger.exception("a grammar could not be compiled")
            error = "the grammar could not be compiled"
        if error is not None:
            self.forget(grammar)
        grammar.settle(matcher, error)
        self.on_settled()
