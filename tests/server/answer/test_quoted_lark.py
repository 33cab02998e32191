"""Grammars of texts as grammars of JSON strings."""

import contextlib
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.answer.quoted_lark import MAX_SIZE, NotQuotable, quoted_lark
from tests.support.cpu_time import takes_less_than

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


def accepts(grammar: str, text: str) -> bool:
    """Return whether the quoted grammar matches the JSON string of a text."""
    tokenizer = LLTokenizer("byte")
    whole = f'start: "\\"" text "\\""\ntext: %lark {{\n{quoted_lark(grammar)}\n}}'
    assert not LLMatcher.validate_grammar(whole, tokenizer)
    matcher = LLMatcher(tokenizer, whole)
    tokens = tokenizer.tokenize_str(json.dumps(text, ensure_ascii=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (PATCH, '*** Begin Patch\n*** Add File: a.py\n+print("hi\\n")\n+\tx\n*** End Patch', "hi"),
        (PATCH, "*** Begin Patch\n*** Update File: é\n@@\n-a\n+b\n*** End Patch\n", "*** Begin"),
        ('start: "a\\"b" /[ -~]+/', 'a"b"\\"', 'a"bé'),
        ('start: /a.b/s "c"i', "a\nbC", "ac"),
        ("start: /a.b/", "a\tb", "a\nb"),
        ('start: "a".."c"+', "abc", "abd"),
        (r'start: /.{2,3}/ /x"y?/', '"\\x"', 'ax"'),
        (r"start: /\S+\s\d{2}/", '"x\\ 12', "x12"),
        (r"start: /[^\"\n]*\x41/", "\\\tA", '"A'),
        ("start: (INT WS_INLINE)+ // numbers\n%import common.INT\n%import common.WS_INLINE",
         "1 22\t3 ", "1,2"),
    ],
)  # fmt: skip
def test_a_json_string_matches_if_its_text_matches(grammar: str, yes: str, no: str) -> None:
    assert accepts(grammar, yes)
    assert not accepts(grammar, no)


@pytest.mark.parametrize(
    "grammar",
    ["start: /^a$/", r"start: /\bword/", "start: <special>", 'start: %json {"type": "string"}',
     "start: X\n%import common.NOTHING", "start: /a(?=b)/", "start: /a/x", r'start: "\q"',
     pytest.param(f'start: "{"a" * MAX_SIZE}"', id="too long")],
)  # fmt: skip
def test_unenforceable_constructs_are_named(grammar: str) -> None:
    with pytest.raises(NotQuotable):
        quoted_lark(grammar)


@pytest.mark.parametrize(
    "part",
    ["<", '"', '\\"', "/", "\\/", "/[", "[a]", "/[a]", "(", "%import ", "A", " .. ", '"a"..'],
)
@pytest.mark.parametrize("inside", [False, True])
def test_hostile_grammar_is_rejected_quickly(part: str, inside: bool) -> None:
    text = part * (MAX_SIZE // len(part) - 4)

    def read() -> None:
        with contextlib.suppress(NotQuotable):
            quoted_lark(f"start: /{text}/" if inside else f"start: {text}")

    takes_less_than(0.5, read)
