"""Conversion of structural tags, which constrain parts of an answer, to Lark grammars.

Both forms that clients of compatible servers send are accepted: `structures` with `triggers`, and a
composed `format` (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.shared.grammar_spec import SOME_WHITESPACE, BadGrammar, lark_from_ebnf
from engine.shared.matchers import MAX_GRAMMAR_SIZE

Text = Annotated[str, Meta(min_length=1)]


class _Format(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all formats."""


class AnyText(_Format, frozen=True, tag="any_text"):
    """Any text, up to what follows."""


class ConstString(_Format, frozen=True, tag="const_string"):
    """A fixed string."""

    value: Text


class JsonSchemaFormat(_Format, frozen=True, tag="json_schema"):
    """JSON that conforms to a schema."""

    json_schema: dict[str, Any] | bool


class RegexFormat(_Format, frozen=True, tag="regex"):
    """Text that matches a regular expression."""

    pattern: Text


class GrammarFormat(_Format, frozen=True, tag="grammar"):
    """Text that matches a grammar, in GBNF or Lark syntax."""

    grammar: Text


class SequenceFormat(_Format, frozen=True, tag="sequence"):
    """A concatenation of formats."""

    elements: Annotated[list["Format"], Meta(min_length=1)]


class OrFormat(_Format, frozen=True, tag="or"):
    """One of several formats."""

    elements: Annotated[list["Format"], Meta(min_length=1)]


class Tag(_Format, frozen=True, tag="tag"):
    """A format between a start string and an end string, or one of several end strings."""

    begin: str
    content: "Format"
    end: str | Annotated[list[str], Meta(min_length=1)]


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Free text in which each trigger starts one of the tags."""

    triggers: Annotated[list[Text], Meta(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    """Whether the output must start with a tag, before any text."""
    stop_after_first: bool = False


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    """Tags with only a separator between them."""

    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    AnyText | ConstString | JsonSchemaFormat | RegexFormat | GrammarFormat | SequenceFormat
    | OrFormat | Tag | TriggeredTags | TagsWithSeparator
)  # fmt: skip


class _Structure(msgspec.Struct, frozen=True):
    begin: Text
    schema: dict[str, Any] | bool
    end: str


class _Structures(msgspec.Struct, frozen=True):
    structures: Annotated[list[_Structure], Meta(min_length=1)]
    triggers: Annotated[list[Text], Meta(min_length=1)]


class _Composed(msgspec.Struct, frozen=True):
    format: Format


class StructuralTag(msgspec.Struct, frozen=True):
    """A structural tag as sent by a client, decoded."""

    value: dict[str, Any]
    whitespace: str | None = None
    """Whitespace between JSON tokens, as in `engine.shared.messages.JsonSchemaGrammar`."""


def lark_from_tag(tag: StructuralTag, special_tokens: Collection[str] = ()) -> str:
    """Convert a structural tag to Lark syntax.

    Args:
        special_tokens: texts of special tokens, which match as single tokens only.

    Raises:
        BadGrammar: the tag is malformed, or cannot be enforced in this form.
    """
    if len(json.dumps(tag.value, ensure_ascii=False)) > MAX_GRAMMAR_SIZE:
        raise BadGrammar(f"the structural tag is longer than {MAX_GRAMMAR_SIZE} characters")
    try:
        if "structures" in tag.value:
            old = msgspec.convert(tag.value, _Structures)
            tags = [
                Tag(each.begin, JsonSchemaFormat(each.schema), each.end) for each in old.structures
            ]
            root: Format = TriggeredTags(old.triggers, tags)
        else:
            root = msgspec.convert(tag.value, _Composed).format
    except msgspec.ValidationError as error:
        raise BadGrammar(str(error)) from error
    return _Writer(special_tokens, tag.whitespace).write(root)


_End = tuple[str, ...] | None
"""Strings of which one follows a format; () for the end of the output, None if unknown."""

_LAST: _End = ()


class _Writer:
    """Collects the rules of one grammar; every format becomes an expression over them."""

    def __init__(self, special_tokens: Collection[str], whitespace: str | None) -> None:
        self._rules: list[str] = []
        # Only these can be named in Lark syntax.
        named = [each for each in special_tokens if each.startswith("<") and each.endswith(">")]
        named.sort(key=len, reverse=True)
        self._special = frozenset(named)
        self._cut = re.compile(f"({'|'.join(map(re.escape, named))})") if named else None
        pattern = SOME_WHITESPACE if whitespace is None else whitespace
        self._json_style: dict[str, Any] = {"whitespace_flexible": pattern != ""}
        if pattern:
            self._json_style["whitespace_pattern"] = pattern

    def write(self, root: Format) -> str:
        """Return the grammar of a format."""
        start = self._format(root, _LAST)
        return "\n".join([f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/"])

    def _format(self, format: Format, end: _End) -> str:
        """Return the expression of a format, given the end that follows it, if known."""
        match format:
            case AnyText() | RegexFormat():
                return self._text(format, end)
            case SequenceFormat():
                return self._sequence(format.elements, end)
            case OrFormat():
                return self._one_of([self._format(each, end) for each in format.elements])
            case Tag():
                return self._tag(format, self._literal(format.begin), end)
            case TriggeredTags():
                return self._triggered(format, end)
            case _:
                return f"{self._plain(format)} {self._ending(end)}"

    def _plain(
        self, format: ConstString | JsonSchemaFormat | GrammarFormat | TagsWithSeparator
    ) -> str:
        """Return the expression of a format that does not depend on what follows it."""
        match format:
            case ConstString():
                return self._literal(format.value)
            case JsonSchemaFormat():
                schema = {} if format.json_schema is True else format.json_schema
                if not isinstance(schema, dict):
                    raise BadGrammar("no value matches the schema")
                options = {"x-guidance": self._json_style, **schema}
                return self._rule(f"%json {json.dumps(options)}")
            case GrammarFormat():
                return self._rule(f"%lark {{\n{lark_from_ebnf(format.grammar)}\n}}")
            case TagsWithSeparator():
                tags = [self._tag(tag, self._literal(tag.begin), None) for tag in format.tags]
                many = tag = self._rule(self._one_of(tags))
                if not format.stop_after_first:
                    many = f"{tag} ({self._literal(format.separator)} {tag})*"
                return f"({many})" if format.at_least_one else f"({many})?"

    def _text(self, format: AnyText | RegexFormat, end: _End) -> str:
        """Return the expression of text up to its end, which it cannot contain."""
        if isinstance(format, AnyText):
            return self._text_until(end)
        from llguidance import regex_to_lark

        try:
            found = regex_to_lark(format.pattern, use_ascii="dw")
        except ValueError as error:
            raise BadGrammar(f"regex {format.pattern[:80]!r}: {error}") from error
        name = f"REGEX_{len(self._rules)}"
        self._rules.append(f"{name}: /{found}/")
        return self._text_until(end, name) if end else name

    def _text_until(self, end: _End, text: str = "TEXT") -> str:
        if end is None:
            raise BadGrammar(
                "any_text needs an end: a tag's end, a following const_string, or none"
            )
        return self._one_of([self._up_to(text, each) for each in end]) if end else text

    def _up_to(self, text: str, end: str) -> str:
        first, *others = self._pieces(end)
        if first in self._special:
            return f"{text} {self._literal(end)}"
        until = self._rule(f"{text} {json.dumps(first)}", "[lazy]")
        return f"{until} {self._literal(''.join(others))}"

    def _sequence(self, elements: Sequence[Format], end: _End) -> str:
        written: list[str] = []
        for index, each in enumerate(elements):
            before = elements[index - 1] if index else None
            follower = elements[index + 1] if index + 1 < len(elements) else None
            if isinstance(each, ConstString) and isinstance(before, AnyText):
                if follower is None:
                    written.append(self._ending(end))
                continue  # already consumed as the end of the text before it
            known = (follower.value,) if isinstance(follower, ConstString) else None
            if isinstance(each, AnyText) and known is not None:
                written.append(self._text_until(known))
            else:
                written.append(self._format(each, end if follower is None else None))
        return " ".join(written)

    def _tag(self, tag: Tag, begin: str, end: _End) -> str:
        ends = (tag.end,) if isinstance(tag.end, str) else tuple(tag.end)
        if ends == ("",):
            return f"{begin} {self._format(tag.content, end)}"
        if "" in ends:
            raise BadGrammar("a tag has either no end or one of several texts")
        return f"{begin} {self._format(tag.content, ends)} {self._ending(end)}"

    def _triggered(self, format: TriggeredTags, end: _End) -> str:
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in format.triggers}
        first: list[str] = []
        for tag in format.tags:
            found = [trigger for trigger in by_trigger if tag.begin.startswith(trigger)]
            if len(found) != 1:
                begins = json.dumps(tag.begin[:80])
                raise BadGrammar(f"exactly one trigger must begin {begins}, not {len(found)}")
            rest = self._literal(tag.begin[len(found[0]) :])
            written = self._rule(self._tag(tag, rest, None))
            by_trigger[found[0]].append(written)
            first.append(f"{self._literal(found[0])} {written}")
        begun = self._one_of([
            f"{self._up_to('TEXT', trigger)} {self._one_of(tags)}"
            for trigger, tags in by_trigger.items() if tags
        ])  # fmt: skip
        rest = self._text_until(end)
        if format.stop_after_first:
            once = f"{self._one_of(first) if format.at_least_one else begun} {self._ending(end)}"
            return once if format.at_least_one else self._one_of([once, rest])
        many = f"{begun}* {rest}"
        return f"{self._one_of(first)} {many}" if format.at_least_one else many

    def _ending(self, end: _End) -> str:
        return self._one_of([self._literal(each) for each in end]) if end else ""

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _one_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})"

    def _pieces(self, text: str) -> list[str]:
        pieces = [text] if self._cut is None else self._cut.split(text)
        return [piece for piece in pieces if piece] or [""]

    def _literal(self, text: str) -> str:
        """Return a string in Lark syntax, with special tokens as token references."""
        return " ".join([
            piece if piece in self._special else json.dumps(piece)
            for piece in self._pieces(text) if piece
        ])  # fmt: skip
