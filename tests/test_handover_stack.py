"""Two stacks and an outside router, which has blocks of prompts handed from one to the other."""

import signal
from collections.abc import Iterator

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import call, completion
from tests.support.metrics import total
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import until

pytestmark = pytest.mark.stack

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar. " * 6
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, RunningStack]]:
    """A stack that computes prompts, and one that answers."""
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text("a shared secret of these tests")

    def stack(*role: str) -> RunningStack:
        return RunningStack(
            "--data-parallel-address", "127.0.0.1",
            "--data-parallel-rpc-port", str(port_of_a_coordinator()),
            "--cluster-key-file", str(key), "--dtype", "float32", "--batch-invariant",
            "--data-parallel-size", "1", "--allow-kv-transfer-params", *role,
        )  # fmt: skip

    consumer = ("--kv-transfer-config", '{"kv_role": "kv_consumer"}')
    with stack("--kv-role", "prefill") as first, stack(*consumer) as second:
        yield first, second


def ask(stack: RunningStack, prompt: str, tokens: int, params: object = None) -> dict[str, object]:
    body = completion(prompt, tokens, temperature=0) | {"kv_transfer_params": params}
    answer: dict[str, object] = call(f"{stack.url}/v1/completions", body)
    return answer


def text(answer: dict[str, object]) -> object:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return choices[0]["text"]


def test_an_answer_goes_on_from_blocks_of_another_stack(
    stacks: tuple[RunningStack, RunningStack],
) -> None:
    first, second = stacks
    expected = text(ask(first, PROMPT, 30))
    params = ask(first, PROMPT, 1, ASKS)["kv_transfer_params"]
    assert text(ask(second, PROMPT, 30, params)) == expected
    until(lambda: total(second.url, "kv_transfer_hits_total") > 100, "blocks were read")
    assert total(second.url, "kv_transfer_failures_total") == 0


def test_the_answer_is_the_same_when_the_engine_before_has_been_killed(
    stacks: tuple[RunningStack, RunningStack],
) -> None:
    first, second = stacks
    prompt = f"Once more: {PROMPT}"
    expected = text(ask(first, prompt, 30))
    params = ask(first, prompt, 1, ASKS)["kv_transfer_params"]
    engine = first.processes()["engine 0"]
    engine.send_signal(signal.SIGKILL)
    engine.wait(30)
    assert text(ask(second, prompt, 30, params)) == expected
    until(lambda: total(second.url, "kv_transfer_failures_total") == 1, "nothing was read")
