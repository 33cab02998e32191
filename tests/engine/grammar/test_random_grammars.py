"""Random output under a random regular expression or grammar matches it."""

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.masks import GrammarTable
from engine.shared.grammar_spec import check_grammar, lark_from_ebnf
from engine.shared.messages import GrammarSpec, LarkGrammar, RegexGrammar
from tests.support.drawing import write


class Form(NamedTuple):
    """A form of texts, written as an expression and as the right side of a rule."""

    regex: str
    rule: str
    """In the common subset of Lark's syntax and GBNF."""


def _literal(text: str) -> Form:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return Form(re.escape(text), f'"{quoted}"')


def _class(characters: str) -> Form:
    return Form(f"[{characters}]", f"[{characters}]")


def _one_of(forms: Sequence[Form]) -> Form:
    return Form(
        f"(?:{'|'.join(each.regex for each in forms)})",
        f"({' | '.join(each.rule for each in forms)})",
    )


def _after_another(forms: Sequence[Form]) -> Form:
    return Form("".join(each.regex for each in forms), f"({' '.join(e.rule for e in forms)})")


def _repeated(form: Form, how: str) -> Form:
    return Form(f"(?:{form.regex}){how}", f"({form.rule}){how}")


_LEAVES = st.one_of(
    st.text('abc "\\/-é', min_size=1, max_size=4).map(_literal),
    st.sampled_from(["a-f", "0-9", "xyz_"]).map(_class),
)
_FORMS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_one_of),
        st.lists(inner, min_size=1, max_size=3).map(_after_another),
        st.tuples(inner, st.sampled_from("?*+")).map(lambda pair: _repeated(*pair)),
    ),
    max_leaves=7,
)


def _as_regex(form: Form) -> GrammarSpec:
    return RegexGrammar(form.regex)


def _as_gbnf(form: Form) -> GrammarSpec:
    return LarkGrammar(lark_from_ebnf(f"root ::= {form.rule}"))


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("written_as", [_as_regex, _as_gbnf])
def test_random_outputs_fit_random_grammars(table: GrammarTable, written_as: Any) -> None:
    @settings(max_examples=60)
    @given(_FORMS, st.integers(0, 999))
    def check(form: Form, seed: int) -> None:
        spec = written_as(form)
        assert check_grammar(spec) is None
        text = write(table, spec, random.Random(seed))
        assert re.fullmatch(form.regex, text), (form.regex, text)

    check()


NESTED = """
start: value
value: "0" | list | "-" value
list: "[" (value ("," "0")*)? "]"
"""


def test_random_outputs_of_a_recursive_grammar_are_complete(table: GrammarTable) -> None:
    depths = []
    for seed in range(20):
        text = write(table, LarkGrammar(NESTED), random.Random(seed))
        depths.append(text.count("["))
        while text != "0":  # the innermost first
            shorter = re.sub(r"-+0|\[(0(,0)*)?\]", "0", text)
            assert shorter != text, text
            text = shorter
    assert max(depths) > 1
