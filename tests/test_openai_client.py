"""The `openai` package against a running server: what its users write has to work."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import MODEL

pytestmark = pytest.mark.stack

PROMPT = "ROMEO:"
CHAT: list[Any] = [{"role": "user", "content": "Good morrow, my lord. What news?"}]


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion_contains_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text.strip()
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 32
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_completion_has_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    finished = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finished[-1] == whole.choices[0].finish_reason
    assert not any(finished[:-1])


def test_chat_answers_streamed_and_unstreamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=40, temperature=0
    )
    message = whole.choices[0].message
    assert (message.role, whole.object) == ("assistant", "chat.completion")
    assert message.content
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=CHAT, max_completion_tokens=40, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_responses_answer_streamed_and_unstreamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model=MODEL, input="Good morrow, my lord.", instructions="Speak as Romeo.",
        max_output_tokens=40, temperature=0,
    )  # fmt: skip
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 40
    with client.responses.stream(
        model=MODEL, input="Good morrow, my lord.", instructions="Speak as Romeo.",
        max_output_tokens=40, temperature=0,
    ) as stream:  # fmt: skip
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        last = stream.get_final_response()
    assert "".join(deltas) == last.output_text == whole.output_text
    assert last.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("named", [False, True])
def test_enforced_calls_fit_their_schema(client: openai.OpenAI, named: bool) -> None:
    cities = {"type": "string", "enum": ["Oslo", "Rome"]}
    function = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": cities},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, seed=3, max_completion_tokens=400, parallel_tool_calls=False,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}}
        if named
        else "required",
    )  # type: ignore[call-overload]  # fmt: skip
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert choice.finish_reason == ("stop" if named else "tool_calls")


def test_conversation_continues_with_stored_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Good morrow!", max_output_tokens=8)
    second = client.responses.create(
        model=MODEL, input="And?", max_output_tokens=8, previous_response_id=first.id
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_async_client_streams_many_at_once(stack: RunningStack) -> None:
    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x") as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=16, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed % 4) for seed in range(16)))

    texts = asyncio.run(scenario())
    assert texts[:4] * 4 == texts
    assert len(set(texts)) > 1


def test_completions_return_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == 5
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
    ):
        assert value is not None
        assert value <= 0
        assert top[token] == pytest.approx(value)
        assert max(top.values()) == pytest.approx(value), "greedy takes the likeliest"


def test_chat_returns_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=4, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content
    assert all(len(each.top_logprobs) == 2 for each in content)
    assert (
        b"".join(bytes(each.bytes or []) for each in content)
        .decode(errors="replace")
        .startswith((choice.message.content or "")[:1])
    )


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="To be, or not to be", max_tokens=1, temperature=0, echo=True,
        logprobs=1,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert answer.choices[0].text.startswith("To be, or not to be")
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def test_n_gives_different_choices_in_one_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        n=3,
        seed=5,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 72


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0)
    stop = free.choices[0].text[10:13]
    stopped = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0, stop=stop
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text.split(stop)[0]


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "word " * 5000}, openai.BadRequestError, "prompt"),
    ],
)
def test_bad_requests_raise_the_right_error_naming_the_parameter(
    client: openai.OpenAI,
    changes: dict[str, object],
    error: type[openai.APIStatusError],
    param: str,
) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, **changes}
    with pytest.raises(error) as caught:
        client.completions.create(**request)  # type: ignore[call-overload]
    assert isinstance(caught.value.body, dict)
    assert str(caught.value.body["param"]).startswith(param)
    assert caught.value.body["message"]
