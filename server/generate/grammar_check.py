"""Whether engines can enforce a grammar, found out beside the event loop and remembered."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from engine.shared.grammar_spec import BadGrammar, GrammarThreads, check_grammar, lark_from_ebnf
from engine.shared.messages import GrammarSpec, LarkGrammar
from server.generate.structural_tags import StructuralTag, lark_from_tag
from server.http.errors import invalid

CHECK_THREADS = 2
MAX_REMEMBERED = 4096
"""Grammars whose check is not repeated; only their digests are kept."""


class GrammarText(msgspec.Struct, frozen=True):
    """A grammar as a client writes it, in Lark's syntax or in GBNF."""

    text: str


class GrammarCheck:
    """Checks grammars beside the event loop, and remembers what it found."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are the texts of tokens that Lark grammars may name as `<...>`."""
        self._special_tokens = tuple(special_tokens)
        self._threads = GrammarThreads(CHECK_THREADS, "grammar check")
        self._found: OrderedDict[bytes, str | None] = OrderedDict()

    async def require(
        self, wanted: GrammarSpec | GrammarText | StructuralTag, param: str
    ) -> GrammarSpec:
        """Check that engines can enforce a grammar; return it as they take it.

        Raises:
            ApiError: they cannot; `param` is the field that it came from.
        """
        spec = await self._spec(wanted, param)
        digest = blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()
        if digest in self._found:
            self._found.move_to_end(digest)
        else:
            check = self._threads.submit(check_grammar, spec, self._special_tokens)
            self._found[digest] = await asyncio.wrap_future(check)
            if len(self._found) > MAX_REMEMBERED:
                self._found.popitem(last=False)
        reason = self._found[digest]
        if reason is not None:
            raise invalid(f"{param}: {reason}", param)
        return spec

    async def _spec(
        self, wanted: GrammarSpec | GrammarText | StructuralTag, param: str
    ) -> GrammarSpec:
        """Return a grammar in a form that engines take, though they may not be able to enforce it.

        Raises:
            ApiError: it has no such form.
        """
        match wanted:
            case GrammarText(text):
                converted = self._threads.submit(lark_from_ebnf, text)
            case StructuralTag():
                converted = self._threads.submit(lark_from_tag, wanted, self._special_tokens)
            case _:
                return wanted
        try:
            return LarkGrammar(await asyncio.wrap_future(converted))
        except BadGrammar as error:
            raise invalid(f"{param}: {error}", param) from error
