"""Pattern matching and analysis without backtracking."""

from functools import partial

import pytest

from engine.shared.matchers import Expression, keys_of
from tests.support.cpu_time import cpu_seconds, grows_no_faster_than_input


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("a+", "aaa", True),
        ("a+", "aab", False),
        ("a*", "", True),
        ("a", "", False),
        (r"\d\w", "1_", True),
        (r"\d", "٣", False),
        ("é|ü", "ü", True),
        (r"(.*\.)?(q|k)_proj", "model.layers.0.self_attn.k_proj", True),
    ],
)
def test_expression_matches_entire_texts(pattern: str, text: str, fits: bool) -> None:
    assert Expression(pattern).matches(text) is fits


@pytest.mark.parametrize("pattern", ["[", "(?=a)b", r"(a)\1"])
def test_irregular_expressions_are_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Expression(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a|a)*", "(a|aa)+", "(.*a){10}", "(a?){50}a{50}", "(a|b)*a(a|b){20}", "(.|.)*b"],
)
def test_nested_quantifiers_match_in_linear_time(pattern: str) -> None:
    expression = Expression(pattern)
    expression.matches("a" * 200)

    half, whole = (partial(expression.matches, "a" * size + "!") for size in (30_000, 60_000))
    if cpu_seconds(whole) > 0.02:
        grows_no_faster_than_input(half, whole)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("^a$", ["a"]),
        ("^(a|bc)$", ["a", "bc"]),
        ("^a$|^bc$", ["a", "bc"]),
        ("^a|bc$", None),
        ("^[abc|]{1}$", None),
        ("a", None),
        ("^x$", None),
        ("(?=a)", None),
        ("[", None),
    ],
)
def test_keys_of_finite_pattern_are_listed(pattern: str, matched: list[str] | None) -> None:
    assert keys_of(pattern, ["a", "bc", "", "d"]) == matched
