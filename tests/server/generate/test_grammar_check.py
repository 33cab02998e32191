"""Grammars are checked off the event loop, fairly among tenants."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.shared.messages import JsonSchemaGrammar, LarkGrammar, RegexGrammar
from server.errors import ApiError
from server.generate import grammar_check
from server.generate.grammar_check import GrammarCheck
from server.generate.grammar_process import Check, GrammarText, JobResult
from server.helper_process import HelperProcess
from tests.support.waiting import PATIENCE

COSTLY: dict[str, dict[str, Any]] = {
    "properties": {f"p{number}": {} for number in range(9000)},
    "patternProperties": {f"^(a+)+{number}$": {} for number in range(60)},
}
"""Takes more than ten seconds to compile."""


@pytest.fixture(autouse=True)
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "HelperProcess", HelperProcess)


def have_checked(monkeypatch: pytest.MonkeyPatch, check: Callable[[str], object]) -> None:
    """Check patterns with a function instead of a process."""

    class Helper:
        def __init__(self, *_: object) -> None:
            pass

        def answer(self, job: bytes, _: float) -> bytes:
            spec = msgspec.msgpack.decode(job, type=Check).spec
            assert isinstance(spec, RegexGrammar)
            check(spec.pattern)
            return msgspec.msgpack.encode(JobResult())

    monkeypatch.setattr(grammar_check, "HelperProcess", Helper)


async def test_one_tenants_slow_grammars_leave_a_thread_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, order = threading.Event(), list[str]()

    def slow(pattern: str) -> None:
        if pattern.startswith("slow"):
            assert release.wait(PATIENCE)
        order.append(pattern)

    have_checked(monkeypatch, slow)
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


async def test_number_of_waiting_grammars_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    have_checked(monkeypatch, lambda _: release.wait(PATIENCE))
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
async def test_slow_grammar_check_times_out_and_next_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_WAIT", 2 * PATIENCE)  # the machine may be busy
    checks = GrammarCheck()
    names = "\n".join(f"T{n}: /[a-z]+{n}x/" for n in range(400))
    large = LarkGrammar("start: " + "|".join(f"T{n}" for n in range(400)) + "\n" + names)
    costly = JsonSchemaGrammar(json.dumps(COSTLY))
    with pytest.raises(ApiError, match="more than 2 s of processor time") as caught:
        await checks.require(costly, "json")
    assert caught.value.status == 400
    assert await checks.require(large, "grammar") == large
    gbnf = "root ::= " + " | ".join(f'"word {n}"' for n in range(600))
    converted = await checks.require(GrammarText(gbnf), "grammar")
    assert isinstance(converted, LarkGrammar)
    with pytest.raises(ApiError, match="neither Lark"):
        await checks.require(GrammarText("nothing " * 1000), "grammar")


@pytest.mark.slow
async def test_check_can_be_retried_if_no_process_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = GrammarCheck()
    with monkeypatch.context() as broken:
        broken.setattr("server.helper_process.sys.executable", "/no/such/python")
        with pytest.raises(ApiError, match="cannot be checked now") as caught:
            await checks.require(RegexGrammar("a"), "regex")
    assert caught.value.status == 503
    assert await checks.require(RegexGrammar("a"), "regex") == RegexGrammar("a")
