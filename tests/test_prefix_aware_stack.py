"""Chats go where their beginnings are cached, also after the engine that had them was killed."""

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import call
from tests.support.metrics import metric, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

SYSTEM = "You answer as Shakespeare would, in one line and in verse. " * 12
BLOCK = 16
LONG = 300
"""Tokens of an answer in the middle of which an engine dies."""
SLOW_STEPS = ("--executor", "simulated", "--simulated-step-us", "10000")
"""Engines work long enough on long answers for their loads to be seen."""
NAMES = ("Antonio", "Bassanio", "Cordelia", "Desdemona", "Edmund")


class Chat:
    """A conversation whose beginning is its own."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._messages = [{"role": "system", "content": f"I am {name}. {SYSTEM}"}]
        self.num_blocks = 0
        """Blocks that the newest prompt fills: so many at least are cached of the next one."""

    def turn(self, max_tokens: int = 12, *, ignore_eos: bool = False) -> tuple[int, int]:
        """Go on; return how many blocks were cached, and how many there were of the turn before."""
        self._messages.append({"role": "user", "content": "What says the moon tonight?"})
        body = {
            "messages": self._messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": ignore_eos,
        }
        answer = call(f"{self._url}/v1/chat/completions", body)
        usage = answer["usage"]
        self._messages.append(answer["choices"][0]["message"])
        before, self.num_blocks = self.num_blocks, usage["prompt_tokens"] // BLOCK
        return usage["prompt_tokens_details"]["cached_tokens"] // BLOCK, before


def test_chats_find_their_prefix_on_one_engine_and_survive_its_death() -> None:
    flags = ("--data-parallel-size", "3", "--api-server-count", "2", *SLOW_STEPS)
    with RunningStack(*flags, "--routing-policy", "prefix-aware") as stack:
        chats = [Chat(stack.url, name) for name in NAMES]
        for chat in chats:
            chat.turn()
        all_hit(stack, chats)
        decisions = metric(stack.url, "routing_decisions_total")
        assert len(decisions) > 1, "beginnings that are new spread over engines"
        busiest = max(decisions, key=decisions.__getitem__)
        engine = stack.processes()[f"engine {busiest}"]
        with ThreadPoolExecutor(len(chats)) as threads:
            answers = [threads.submit(chat.turn, LONG, ignore_eos=True) for chat in chats]
            until(lambda: metric(stack.url, "num_requests_running")[busiest] > 0, "it runs some")
            engine.send_signal(signal.SIGKILL)
            for answer in answers:
                answer.result()
        engine.wait(30)
        assert total(stack.url, "requests_resumed_total") > 0
        until(lambda: total(stack.url, "engines_ready") == 3, "its successor is there")
        for chat in chats:
            chat.turn()  # those of the dead engine are computed anew
        all_hit(stack, chats)
        expected = total(stack.url, "routing_expected_cached_tokens_total")
        found = total(stack.url, "routing_found_cached_tokens_total")
        assert 0.8 * found < expected <= found, "nothing is evicted; the newest may be unknown"
        assert total(stack.url, "routing_index_resyncs_total") == 0


def all_hit(stack: RunningStack, chats: list[Chat]) -> None:
    """Have all chats go on, each when all that they left in caches is known."""
    for chat in chats:
        there = sum(each.num_blocks for each in chats)
        until(partial(is_known, stack.url, there), "both API servers know blocks and loads")
        cached, before = chat.turn()
        assert cached >= before - 1, "a template may end the prompt before in another way"


def is_known(url: str, num_blocks: int) -> bool:
    """Whether whichever API server answers knows so many blocks, and that no engine works."""
    if total(url, "num_requests_running") + total(url, "queued_prefill_tokens") > 0:
        return False
    return all(total(url, "routing_index_blocks") >= num_blocks for _ in range(6))
