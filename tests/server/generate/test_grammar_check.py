"""Grammars of tenants are checked in turns, beside the event loop."""

import asyncio
import json
import threading
from typing import Any

import pytest

from engine.shared.messages import JsonSchemaGrammar, LarkGrammar, RegexGrammar
from server.errors import ApiError
from server.generate import grammar_check
from server.generate.grammar_check import MAX_SHORT, GrammarCheck
from server.generate.grammar_process import Check, Found, GrammarText
from tests.support.waiting import PATIENCE

COSTLY: dict[str, dict[str, Any]] = {
    "properties": {f"p{number}": {} for number in range(9000)},
    "patternProperties": {f"^(a+)+{number}$": {} for number in range(60)},
}
"""Takes ten seconds and more."""


async def test_one_tenants_slow_grammars_leave_a_thread_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, order = threading.Event(), list[str]()

    def slow(job: Check) -> Found:
        assert isinstance(job.spec, RegexGrammar)
        if job.spec.pattern.startswith("slow"):
            assert release.wait(PATIENCE)
        order.append(job.spec.pattern)
        return Found()

    monkeypatch.setattr(grammar_check, "found", slow)

    checks = GrammarCheck()
    slow_ones = [
        asyncio.create_task(checks.require(RegexGrammar(f"slow{number}"), "regex", 1))
        for number in range(8)
    ]
    await asyncio.sleep(0)
    for number in range(3):
        await asyncio.wait_for(checks.require(RegexGrammar(f"{number}"), "regex", 2), PATIENCE)
    assert order == ["0", "1", "2"]
    release.set()
    await asyncio.gather(*slow_ones)
    assert len(order) == 11


async def test_no_more_grammars_wait_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    monkeypatch.setattr(
        grammar_check, "found", lambda _: Found() if release.wait(PATIENCE) else None
    )

    checks = GrammarCheck()
    waiting = [
        asyncio.create_task(checks.require(RegexGrammar(f"{number}"), "regex", 1))
        for number in range(520)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="Too many grammars") as caught:
        await checks.require(RegexGrammar("one more"), "regex", 1)
    assert caught.value.status == 503
    other = asyncio.create_task(checks.require(RegexGrammar("other"), "regex", 2))
    await asyncio.sleep(0)
    assert not other.done()
    release.set()
    await other
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.slow  # it starts processes
async def test_a_large_grammar_is_given_up_and_the_next_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_WAIT", 2 * PATIENCE)  # the processors may be others'
    checks = GrammarCheck()
    names = "\n".join(f"T{n}: /[a-z]+{n}x/" for n in range(400))
    large = LarkGrammar("start: " + "|".join(f"T{n}" for n in range(400)) + "\n" + names)
    assert len(large.text) > MAX_SHORT
    costly = JsonSchemaGrammar(json.dumps(COSTLY))
    with pytest.raises(ApiError, match="more than 2 s of processor time") as caught:
        await checks.require(costly, "json")
    assert caught.value.status == 400
    assert await checks.require(large, "grammar") == large
    gbnf = "root ::= " + " | ".join(f'"word {n}"' for n in range(600))
    assert len(gbnf) > MAX_SHORT
    converted = await checks.require(GrammarText(gbnf), "grammar")
    assert isinstance(converted, LarkGrammar)
    with pytest.raises(ApiError, match="neither Lark"):
        await checks.require(GrammarText("nothing " * 1000), "grammar")


@pytest.mark.slow
async def test_where_no_process_can_be_started_it_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check, "_PROCESS", "server.no_such_module")

    checks = GrammarCheck()
    with pytest.raises(ApiError, match="cannot be checked now") as caught:
        await checks.require(RegexGrammar("a" * (MAX_SHORT + 1)), "regex")
    assert caught.value.status == 503
    assert await checks.require(RegexGrammar("a"), "regex") == RegexGrammar("a")
