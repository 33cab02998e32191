"""The exact memory cost of a JSON text is known before it is parsed."""

import contextlib
import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import json_price
from server.json_price import Price, TooCostly, check_price, checked_parts, costly_field, price
from server.limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_KEYS

texts = st.text(alphabet='ab"\\,:[]{}\n é', max_size=12)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=30,
)


def counted(value: Any) -> Price:
    """Count the values in a parsed document."""
    if isinstance(value, dict):
        inner = [counted(each) for each in value.values()]
        total = Price(1 + len(value), 1)
    elif isinstance(value, list):
        inner = [counted(each) for each in value]
        total = Price(1, 1)
    else:
        return Price(1)
    for each in inner:
        total = total.plus(each)
    return total._replace(depth=1 + max((each.depth for each in inner), default=0))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@given(documents, st.booleans(), st.sampled_from([2, 3, 7, 2**17]))
def test_brackets_in_strings_cost_nothing(document: Any, ascii_only: bool, part: int) -> None:
    wrapped = [document, ",:" * MAX_JSON_DEPTH]
    with pytest.MonkeyPatch.context() as patch:  # at any split position
        patch.setattr(json_price, "_PART_BYTES", part)
        found = price(json.dumps(wrapped, ensure_ascii=ascii_only).encode())
    exact = counted(wrapped)
    assert found.containers == exact.containers
    # Each container counts one more than its items, because commas do not reveal empty ones.
    assert exact.values <= found.values <= exact.values + exact.containers


@pytest.mark.parametrize("prefix", ["", '"[[[\\"",' * 100])
def test_depth_is_measured_to_the_deepest_value(prefix: str) -> None:
    siblings = ",".join(nested(3) for _ in range(200))
    text = f"[{prefix}{siblings},{nested(90)},{siblings}]".encode()
    assert price(text).depth == 91
    price(text).check()
    with pytest.raises(TooCostly, match="levels"):
        price(f"[{siblings},{nested(MAX_JSON_DEPTH)}]".encode()).check()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" + b"0," * MAX_JSON_VALUES + b"0]", "values"),
        (b"[" + b'"",' * MAX_JSON_VALUES + b"0]", "values"),
        (b"[" + b'"a,b",' * MAX_JSON_VALUES + b"0]", "values"),
        (b"{" + b'"a":0,' * (MAX_JSON_VALUES // 2) + b'"":0}', "values"),
        (b"[" + b"[]," * MAX_JSON_CONTAINERS + b"0]", "arrays"),
        (b"[" + b"{}," * MAX_JSON_CONTAINERS + b"0]", "arrays"),
        (b"[" * 5000, "levels"),
        (b'"' * 2**21 + b",[" * 200, "levels"),
        (b"," * 2**22, "values"),
    ],
)
def test_bodies_that_expand_too_much_are_refused(text: bytes, what: str) -> None:
    with pytest.raises(TooCostly, match=what):
        price(text).check()


def test_the_largest_legal_prompts_pass() -> None:
    price(b'{"prompt":[' + b"123456," * (2**18 - 1) + b"1]}").check()
    price(b'{"prompt":"' + b'\\"[[,{\\\\' * 2**18 + b'"}').check()


def test_scan_stops_when_limit_is_exceeded() -> None:
    parts = checked_parts(b"[" + b"0," * 2**21)
    for _ in range(2 * MAX_JSON_VALUES // json_price._PART_BYTES):
        next(parts)
    with pytest.raises(TooCostly, match="values"):
        next(parts)


@pytest.mark.parametrize("text", [b"[" * 2**20, b"[" * 200 + b"]" * 2**17])
def test_few_brackets_are_processed_in_python(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    looked = 0

    def counting(steps: Iterator[int], initial: int) -> Iterator[int]:
        nonlocal looked
        for step in accumulate(steps, initial=initial):
            looked += 1
            yield step

    monkeypatch.setattr(json_price, "accumulate", counting)
    with pytest.raises(TooCostly):
        check_price(text)
    assert looked < 2 * MAX_JSON_CONTAINERS


@pytest.mark.parametrize("text", [b"a", b"0,", b"{},", b'"a,b",', b"\\\\"])
def test_other_tasks_run_after_every_part_of_a_text(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    looked: list[int] = []
    outside = json_price._outside_strings

    def noted(part: bytes) -> tuple[bytes, bool]:
        looked.append(len(part))
        return outside(part)

    monkeypatch.setattr(json_price, "_outside_strings", noted)
    turns = 0
    with contextlib.suppress(TooCostly):
        for _ in checked_parts(b'{"a":["' + text * (2**19 // len(text)) + b'"]}'):
            turns += 1
            assert len(looked) == turns, "there is no other pass over all of it"
    assert max(looked) <= 2**15 + 1
    assert turns >= 2**19 // 2**15 - 1


def test_costly_field_is_not_searched_in_large_body() -> None:
    values = b"[" + b"0," * MAX_JSON_VALUES + b"0]"
    assert costly_field(b'{"a":1,"input":%s}' % values) == "input"
    assert costly_field(b'{"a":1,"input":%s}' % (values + b" " * 2**20)) is None


def test_costly_field_is_not_searched_in_objects_with_many_keys() -> None:
    deep = b"[" * 200 + b"]" * 200
    assert costly_field(b'{"a": 1, "tools": %s}' % deep) == "tools"
    many = b",".join(b'"k%d":0' % number for number in range(MAX_KEYS + 1))
    assert costly_field(b'{%s, "tools": %s}' % (many, deep)) is None
