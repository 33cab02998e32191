"""Tenants with real processes: two front ends, and an engine with a simulated model."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.stack

FLAGS = (
    "--executor", "simulated", "--simulated-step-us", "20000", "--max-num-seqs", "4",
    "--max-queue", "20", "--prefix-cache-isolation", "tenant", "--max-sequences-per-key", "12",
    "--max-model-len", "16384", "--data-parallel-size", "1",
)  # fmt: skip


async def complete(url: str, key: str, **fields: object) -> httpx.Response:
    """Ask for a completion on a connection of its own, so that any front end may get it."""
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=2 * PATIENCE, verify=False) as client:
        return await client.post(f"{url}/v1/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("hog: hog-1\nhog: hog-2\nguest: guest\n")
    with RunningStack(*FLAGS, "--api-key-file", str(keys)) as stack:
        yield stack.url


def test_tenants_cannot_observe_prompts_of_others(url: str) -> None:
    secret = "the launch code is four five six seven " * 10

    async def ask(key: str, **fields: object) -> int:
        answer = (await complete(url, key, prompt=secret, max_tokens=1, **fields)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def guess() -> None:
        assert await ask("hog-1") == 0
        assert await ask("hog-2") > 0, "keys of one name are one tenant"
        assert await ask("hog-1", cache_salt="mine") == 0
        assert await ask("hog-1", cache_salt="mine") > 0
        assert await ask("guest") == 0
        assert await ask("guest", cache_salt="mine") == 0

    asyncio.run(guess())


def test_flood_of_one_tenant_does_not_slow_others(url: str) -> None:
    async def flood() -> None:
        crowd = [
            asyncio.create_task(complete(url, f"hog-{1 + n % 2}", prompt=f"{n}", max_tokens=16000))
            for n in range(30)
        ]
        refused: list[httpx.Response] = []
        while len(refused) < 30 - 12:
            done, _ = await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
            refused += [each.result() for each in done]
            crowd = [each for each in crowd if each not in done]
        assert Counter(answer.status_code for answer in refused) == {429: 18}
        error = refused[0].json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "max_sequences_per_key is 12" in error["message"]
        assert int(refused[0].headers["retry-after"]) >= 1
        # The 12 would hold all 4 slots for five minutes; four others end before the first of them.
        answers = await asyncio.gather(*(complete(url, "guest", prompt=f"{n}") for n in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert not any(each.done() for each in crowd), "the guest waited for the flood"
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(flood())
