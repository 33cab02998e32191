"""Responses that are kept by the front ends of a node, of which one dies while it writes."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.running_stack import RunningStack

pytestmark = pytest.mark.stack

NUM_RESPONSES = int(os.environ.get("SWELL_TEST_KEPT", "400"))
"""How many are made; the environment may ask for a longer run."""
NUM_CLIENTS = 16


def test_nothing_that_was_answered_is_lost_when_a_front_end_dies_while_it_writes() -> None:
    with (
        RunningStack("--log-level", "warning", "--api-server-count", "2") as stack,
        httpx.Client(base_url=stack.url, timeout=60) as http,
    ):
        answered: dict[str, str] = {}

        def ask(number: int) -> None:
            body = {"model": "swell-shakespeare", "input": f"{number}", "max_output_tokens": 2}
            try:
                # Each on a connection of its own, so that both front ends have their share.
                answer = httpx.post(f"{stack.url}/v1/responses", json=body, timeout=60)
            except httpx.TransportError:
                return  # of the front end that was killed: the client does not know
            assert answer.status_code == 200, answer.text
            answered[answer.json()["id"]] = answer.text

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            asked = [clients.submit(ask, number) for number in range(NUM_RESPONSES)]
            deadline = time.monotonic() + 60
            while len(answered) < NUM_RESPONSES // 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            victim = next(each for name, each in stack.processes().items() if "api" in name)
            victim.send_signal(signal.SIGKILL)
            for each in asked:
                each.result()

        assert len(answered) >= NUM_RESPONSES - 2 * NUM_CLIENTS
        for id_, text in answered.items():
            shown = http.get(f"/v1/responses/{id_}")
            assert shown.status_code == 200, id_
            assert shown.text == text
        last = next(reversed(answered))
        body = {"model": "swell-shakespeare", "input": "and?", "previous_response_id": last}
        assert http.post("/v1/responses", json=body).status_code == 200
