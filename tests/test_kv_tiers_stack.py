"""Engines of a stack share what they have computed of prompts, also with those that come after."""

import signal
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import complete, completion, fetch
from tests.support.metrics import total
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar. " * 6


def hits(url: str) -> float:
    return total(url, "kv_tier_hits_total")


def stored(url: str) -> float:
    return total(url, "kv_tier_stored_bytes_total")


def test_restarted_engine_finds_its_prefixes(tmp_path: Path) -> None:
    tier = str(tmp_path / "tier")
    flags = ("--data-parallel-size", "1", "--kv-disk-tier-dir", tier, "--dtype", "float32")
    with RunningStack(*flags) as stack:
        expected = complete(stack.url, PROMPT, 12)
        until(lambda: stored(stack.url) > 0, "blocks are stored")
        engine = stack.processes()["engine 0"]
        engine.send_signal(signal.SIGKILL)
        engine.wait(PATIENCE)
        asked = completion(PROMPT, 12, temperature=0)
        url = f"{stack.url}/v1/completions"
        until(lambda: fetch(url, asked).status == 200, "its successor serves")
        assert complete(stack.url, PROMPT, 12) == expected
        until(lambda: hits(stack.url) > 0, "its successor has read them")


def test_engines_of_a_node_share_host_memory() -> None:
    with RunningStack("--kv-memory-tier-bytes", "64MiB", "--data-parallel-size", "2") as stack:
        answers = {complete(stack.url, PROMPT, 12, seed=n) for n in range(2)}
        until(lambda: stored(stack.url) > 0, "blocks are stored")
        answers |= {complete(stack.url, PROMPT, 12, seed=n) for n in range(6)}
        assert len(answers) == 1
