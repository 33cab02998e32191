"""The Responses endpoint: items in, items out, and the events between."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from server.config import FrontEndConfig, HttpConfig
from server.config.answer import AnswerConfig
from server.text.tokenizer import ServedTokenizer
from tests.server.api.test_chat_tools import TEMPLATE, TWO_CALLS
from tests.server.conftest import prompt_of, tiny, tokenizer_with

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"type": "function", "name": "now"}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a line."}
DIGITS = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
SEARCH = {"type": "web_search"}
EVERYTHING = f"<think>\nhm\n</think>\n\n{TWO_CALLS}"


@pytest.fixture
def tokenizer(backend: Tokenizer) -> ServedTokenizer:
    return tokenizer_with(backend, TEMPLATE, AddedToken("<think>"), AddedToken("</think>"))


@pytest.fixture
def config(request: pytest.FixtureRequest) -> FrontEndConfig:
    return tiny(
        http=HttpConfig(max_logprobs=5),
        answer=getattr(request, "param", AnswerConfig(reasoning_parser="qwen3")),
    )


plain = pytest.mark.parametrize("config", [AnswerConfig()], indirect=True)


def respond(http: Any, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/responses", {"model": "tiny", "input": "hello", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def stream(http: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "input": "hello", "stream": True, **fields}
    response = http.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    *frames, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Remove fields that differ between answers."""
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]
    kept = {key: value for key, value in response.items() if key not in ("id", "created_at")}
    return {**kept, "output": output}


def test_text_is_answered_with_a_message(http: Any, engines: Any) -> None:
    body = respond(http, instructions="be brief", metadata={"a": "b"}, user="me")
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    (item,) = body["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
        ],
    }
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert (body["metadata"], body["user"], body["store"]) == ({"a": "b"}, "me", False)
    usage = body["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert prompt_of(engines) == "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"


def test_items_become_turns(http: Any, engines: Any) -> None:
    respond(
        http,
        instructions="be brief",
        input=[
            {"role": "developer", "content": "and kind"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "wait", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "13:00"}],
            },
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": "two"},
        ],
    )
    assert prompt_of(engines) == (
        "<|system|>be brief\n\nand kind<|end|><|user|>hi<|end|><|assistant|><think>hm</think>wait"
        '<tool_call>now:{}</tool_call><tool_call>now:{"a": 1}</tool_call><|end|>'
        "<|tool|>12:00<|end|><|tool|>13:00<|end|><|assistant|>one<|end|><|assistant|>two<|end|>"
        "<|assistant|>"
    )


def test_reasoning_text_and_calls_are_items(http: Any, engines: Any) -> None:
    engines.script = engines.answer(EVERYTHING)
    body = respond(http, tools=[WEATHER, NOW])
    reasoning, message, *calls = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "get_weather", '{"city": "Oslo"}'),
        ("function_call", "now", "{}"),
    ]
    assert all(call["call_id"].startswith("call_") for call in calls)
    assert len({item["id"] for item in body["output"]}) == 4
    ids = engines.tokenizer.encode("<think>\nhm\n</think>", add_special_tokens=False)
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": len(ids)}
    hidden = respond(http, tools=[WEATHER, NOW], include_reasoning=False)
    assert [item["type"] for item in hidden["output"]] == [
        item["type"] for item in (message, *calls)
    ]


def test_a_stream_has_events_for_every_item_in_order(http: Any, engines: Any) -> None:
    engines.script = engines.answer(EVERYTHING, cut=engines.random_cuts(1))
    events = stream(http, tools=[WEATHER, NOW])
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for kind, after in zip(kinds, [*kinds[1:], ""], strict=True) if kind != after]
    call = [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
    ]  # fmt: skip
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *call, *call,
        "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_stream_ends_with_the_described_response(http: Any, engines: Any, seed: int) -> None:
    engines.script = engines.answer(EVERYTHING, cut=engines.random_cuts(seed))
    whole = respond(http, tools=[WEATHER, NOW])
    events = stream(http, tools=[WEATHER, NOW])
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    for index, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1]["item"] == item
        text = "".join(event.get("delta", "") for event in mine)
        content = item.get("content")
        assert text == (content[0]["text"] if content else item["arguments"])
        assert all(event["item_id"] == item["id"] for event in mine[1:-1])
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


@pytest.mark.parametrize("streamed", [False, True])
def test_too_few_tokens_leave_a_response_incomplete(http: Any, streamed: bool) -> None:
    if streamed:
        last = stream(http, max_output_tokens=2)[-1]
        assert last["type"] == "response.incomplete"
        body = last["response"]
    else:
        body = respond(http, max_output_tokens=2)
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["max_output_tokens"] == 2


def test_an_empty_answer_is_an_empty_message(http: Any, engines: Any) -> None:
    engines.script = engines.answer("")
    (item,) = respond(http)["output"]
    assert item["content"][0]["text"] == ""
    kinds = [event["type"] for event in stream(http)]
    assert kinds[-1] == "response.completed"
    assert "response.output_text.done" in kinds


@plain
def test_log_probabilities_belong_to_the_text(http: Any) -> None:
    body = respond(http, top_logprobs=2)
    (part,) = body["output"][0]["content"]
    assert "".join(each["token"] for each in part["logprobs"]).startswith("hello world")
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])
    events = stream(http, include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == part["logprobs"]


def test_stream_failure_is_an_event(http: Any, engines: Any) -> None:
    whole = engines.script

    def fails(made: Any) -> list[Any]:
        return [*whole(made)[:2], RuntimeError("broken")]

    engines.script = fails
    events = stream(http)
    assert events[-1]["type"] == "error"
    assert events[-1]["code"] == "internal_error"
    assert "broken" not in events[-1]["message"]


def test_custom_tool_gets_text_input(http: Any, engines: Any) -> None:
    call = {"name": "shell", "arguments": {"input": 'echo "hi"'}}
    engines.script = engines.answer(f"<tool_call>{json.dumps(call)}</tool_call>")
    fields: dict[str, Any] = {"tools": [SHELL, NOW], "max_output_tokens": 200}
    (item,) = respond(http, **fields)["output"]
    assert item.pop("id").startswith("ctc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "type": "custom_tool_call", "status": "completed", "name": "shell", "input": 'echo "hi"'
    }  # fmt: skip
    events = stream(http, **fields)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[4]["input"] == 'echo "hi"'
    assert without_ids(events[-1]["response"])["output"] == [item]


def test_custom_tool_input_is_returned_unchanged(http: Any, engines: Any) -> None:
    call = {"name": "shell", "arguments": {"line": "ls"}}
    engines.script = engines.answer(f"<tool_call>{json.dumps(call)}</tool_call>")
    (item,) = respond(http, tools=[SHELL], max_output_tokens=200)["output"]
    assert json.loads(item["input"]) == {"line": "ls"}


def test_calls_of_custom_tools_are_turns_like_others(http: Any, engines: Any) -> None:
    respond(
        http,
        input=[
            {"role": "user", "content": "list"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "a b"},
        ],
        tools=[SHELL],
    )
    assert prompt_of(engines).endswith(
        '<|assistant|><tool_call>shell:{"input": "ls"}</tool_call><|end|>'
        "<|tool|>a b<|end|><|assistant|>"
    )


def test_regex_of_custom_tool_is_enforced(http: Any, engines: Any) -> None:
    tool = {**SHELL, "format": DIGITS}
    respond(http, tools=[tool], tool_choice={"type": "custom", "name": "shell"})
    grammar = engines.streams[-1].sampling.grammar
    assert '"pattern": "^(?:[0-9]+)$"' in grammar.text


@pytest.mark.parametrize("instructions", [None, "be brief"])
def test_turns_beyond_context_are_dropped_if_truncation_is_auto(
    http: Any, engines: Any, instructions: str | None
) -> None:
    turns = [
        {"role": role, "content": f"{number} " * 20}
        for number in range(9)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "last"}]
    fields = {"input": items, "max_output_tokens": 100, "instructions": instructions}
    refused = http.post("/v1/responses", {"model": "tiny", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert respond(http, **fields, truncation="auto")["truncation"] == "auto"
    prompt, room = prompt_of(engines), engines.context - 100
    assert len(engines.streams[-1].prompt_token_ids) <= room
    begin = "<|system|>be brief<|end|><|user|>" if instructions else "<|user|>"
    assert prompt.startswith(begin)
    first = int(prompt.removeprefix(begin)[0])
    assert first > 0
    assert prompt.endswith("<|user|>last<|end|><|assistant|>")
    one_more = "".join(
        f"<|{t['role']}|>{t['content']}<|end|>" for t in turns[2 * first - 2 : 2 * first]
    )
    more = engines.tokenizer.encode(one_more, add_special_tokens=False)
    assert len(engines.streams[-1].prompt_token_ids) + len(more) > room


def test_last_turn_beyond_context_is_refused(http: Any) -> None:
    body = {"model": "tiny", "input": "word " * 2000, "truncation": "auto"}
    refused = http.post("/v1/responses", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert respond(http, input="short", truncation="auto")["status"] == "completed"


@pytest.mark.parametrize("cut", ["whole", "tokens", "random"])
def test_log_probabilities_cover_only_text_next_to_reasoning_and_calls(
    http: Any, engines: Any, cut: str
) -> None:
    sizes: dict[str, Any] = {"whole": lambda left: left, "random": engines.random_cuts(3)}
    engines.script = engines.answer(EVERYTHING, cut=sizes.get(cut, lambda left: 1))
    fields = {"tools": [WEATHER, NOW], "max_output_tokens": 250, "top_logprobs": 2}
    for output in (
        respond(http, **fields)["output"],
        stream(http, **fields)[-1]["response"]["output"],
    ):
        (message,) = [item for item in output if item["type"] == "message"]
        (part,) = message["content"]
        assert part["text"].strip() == "Let me see."
        assert "".join(each["token"] for each in part["logprobs"]).startswith("Let me see.")
        assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])


def test_deltas_have_the_log_probabilities_of_their_text(http: Any, engines: Any) -> None:
    engines.script = engines.answer(EVERYTHING)
    events = stream(http, tools=[WEATHER, NOW], max_output_tokens=250, top_logprobs=1)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    tokens = [each for event in deltas for each in event["logprobs"]]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert tokens == done["logprobs"]
    assert "".join(each["token"] for each in tokens) == done["text"]
