"""Tool calls and reasoning in chat completions, from the request to the stream."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from engine.shared.messages import LarkGrammar
from server.config import FrontEndConfig
from server.config.answer import AnswerConfig
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import app_of, prompt_of, tiny, tokenizer_with

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}:"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think %}<think>\n{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
USER = {"role": "user", "content": "hello"}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
THINKER_NAMES = ["qwen3", "deepseek_r1"]
THINKERS = [AnswerConfig(reasoning_parser="qwen3"), AnswerConfig(reasoning_parser="deepseek_r1")]


@pytest.fixture
def tokenizer(backend: Tokenizer) -> ServedTokenizer:
    return tokenizer_with(
        backend,
        TEMPLATE,
        AddedToken("<tool_call>", special=True),
        AddedToken("</tool_call>", special=True),
    )


@pytest.fixture
def config(request: pytest.FixtureRequest) -> FrontEndConfig:
    answer = getattr(request, "param", AnswerConfig(reasoning_parser="qwen3"))
    return tiny(answer=answer)


def added_up(events: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str | None]]:
    """Accumulate deltas like a client; return the message and the finish reasons."""
    message: dict[str, Any] = {}
    reasons = []
    for event in events:
        (choice,) = event["choices"]
        reasons.append(choice["finish_reason"])
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                for call in value:
                    add_call(message.setdefault(key, []), call)
            else:
                message[key] = message.get(key, "") + value
    return message, reasons


def add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        assert delta["id"].startswith("call_")
        assert delta["type"] == "function"
        assert delta["function"]["arguments"] == ""
        calls.append({"name": delta["function"]["name"], "arguments": ""})
    else:
        assert delta.keys() == {"index", "function"}
        assert delta["function"].keys() == {"arguments"}
        assert delta["index"] == len(calls) - 1
    calls[-1]["arguments"] += delta["function"]["arguments"]


def answered(http: Any, streamed: bool, **fields: Any) -> dict[str, Any]:
    """Return a message, complete or accumulated from a stream, with its function calls."""
    if streamed:
        return added_up(http.stream("/v1/chat/completions", {"messages": [USER], **fields}))[0]
    message: dict[str, Any] = http.chat(**fields)["choices"][0]["message"]
    calls = [call["function"] for call in message.pop("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def test_tool_call_is_returned(http: Any, engines: Any) -> None:
    engines.script = engines.answer(CALL)
    (choice,) = http.chat(tools=[WEATHER])["choices"]
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message.pop("reasoning_content") is message.pop("reasoning") is None
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    assert choice["finish_reason"] == "tool_calls"


def test_template_gets_tools_unchanged(http: Any, engines: Any) -> None:
    http.chat(tools=[WEATHER, NOW])
    shown = prompt_of(engines).split("</tools>")[0].removeprefix("<tools>")
    assert json.loads(shown) == [WEATHER, NOW]


def test_the_tokens_of_a_conversation_with_tools_can_be_counted(http: Any, engines: Any) -> None:
    usage = http.chat(tools=[WEATHER])["usage"]
    counted = http.post("/tokenize", {"messages": [USER], "tools": [WEATHER]}).json()
    assert counted["count"] == usage["prompt_tokens"]
    assert counted["tokens"] == engines.streams[-1].prompt_token_ids


@pytest.mark.parametrize(
    "config", [AnswerConfig(), AnswerConfig(tool_call_parser="none")], indirect=True
)
@pytest.mark.parametrize("num_calls", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
def test_truncated_forced_call_shows_no_markup(
    http: Any, engines: Any, config: FrontEndConfig, num_calls: int, streamed: bool
) -> None:
    """vllm-project/vllm#47903: the last of several calls ends before its arguments."""
    tagged = config.answer.tool_call_parser == "auto"
    call = f"{CALL}\n" if tagged else '{"name": "get_weather", "parameters": {}}, '
    for cut in (3, 12, 13, 20, 29):
        text = call * num_calls + call[:cut]
        engines.script = engines.answer(text if tagged else f"[{text}")
        message = answered(http, streamed, tools=[WEATHER], tool_choice="required")
        assert not message.get("content"), cut
        assert len(message.get("tool_calls", ())) == num_calls, cut


@pytest.mark.parametrize("seed", range(4))
def test_stream_adds_up_to_the_full_message(http: Any, engines: Any, seed: int) -> None:
    text = f"<think>\nhm\n</think>\n\n{TWO_CALLS}"
    engines.script = engines.answer(text, cut=engines.random_cuts(seed))
    whole = http.chat(tools=[WEATHER, NOW])["choices"][0]
    body = {"messages": [USER], "tools": [WEATHER, NOW]}
    events = http.stream("/v1/chat/completions", body)
    message, reasons = added_up(events)
    assert message == {
        "role": "assistant",
        "reasoning_content": "hm",
        "reasoning": "hm",
        "content": "Let me see.",
        "tool_calls": [call["function"] for call in whole["message"]["tool_calls"]],
    }
    assert whole["message"]["content"] == "Let me see."
    assert whole["message"]["reasoning_content"] == "hm"
    assert [*filter(None, reasons)] == [whole["finish_reason"]] == ["tool_calls"]
    assert events[-1]["choices"][0]["delta"] == {}


def test_stream_without_calls_has_only_content(http: Any, engines: Any) -> None:
    engines.script = engines.answer("hello <b>world</b>\n")
    events = http.stream("/v1/chat/completions", {"messages": [USER], "tools": [WEATHER]})
    message, reasons = added_up(events)
    assert message == {"role": "assistant", "content": "hello <b>world</b>\n"}
    assert reasons[-1] == "stop"


def test_truncated_arguments_are_shown(http: Any, engines: Any) -> None:
    engines.script = engines.answer('<tool_call>{"name": "now", "arguments": {"a": [1, 2')
    (choice,) = http.chat(tools=[NOW], stop="2")["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": [1, '
    engines.script = engines.answer(CALL)
    (choice,) = http.chat(tools=[WEATHER], max_tokens=40)["choices"]
    assert choice["finish_reason"] == "length"


def test_each_choice_has_its_own_calls(http: Any, engines: Any) -> None:
    engines.script = engines.answer(TWO_CALLS)
    choices = http.chat(tools=[WEATHER, NOW], n=2)["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


def test_parallel_calls_can_be_disabled(http: Any, engines: Any) -> None:
    engines.script = engines.answer(TWO_CALLS)
    (choice,) = http.chat(tools=[WEATHER, NOW], parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
            "tool_calls",
        ),
    ],
)
def test_calls_can_be_enforced(http: Any, engines: Any, choice: Any, reason: str) -> None:
    engines.script = engines.answer(f"<think>hm</think>{CALL}")
    (answer,) = http.chat(tools=[WEATHER, NOW], tool_choice=choice)["choices"]
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert answer["finish_reason"] == reason
    sampling = engines.streams[0].sampling
    assert isinstance(sampling.grammar, LarkGrammar)
    assert ('\\"now\\"' in sampling.grammar.text) == (choice == "required")
    assert sampling.grammar_after == "</think>"


@pytest.mark.parametrize("config", [AnswerConfig(tool_call_parser="none")], indirect=True)
def test_calls_can_be_enforced_in_a_model_without_a_format(http: Any, engines: Any) -> None:
    engines.script = engines.answer('[{"name": "now", "parameters": {"a": 1}}]')
    (answer,) = http.chat(tools=[NOW], tool_choice="required")["choices"]
    call = answer["message"]["tool_calls"][0]["function"]
    assert call == {"name": "now", "arguments": '{"a": 1}'}


def test_strict_tool_schemas_are_enforced_in_any_text(http: Any, engines: Any) -> None:
    http.chat(tools=[WEATHER])
    assert engines.streams[-1].sampling.grammar is None
    strict: dict[str, Any] = {
        "type": "function",
        "function": {**WEATHER["function"], "strict": True},
    }
    http.chat(tools=[strict])
    assert isinstance(engines.streams[-1].sampling.grammar, LarkGrammar)
    assert engines.streams[-1].sampling.grammar_after == ""


def test_structured_answer_can_be_a_call_instead(http: Any, engines: Any) -> None:
    engines.script = engines.answer(CALL)
    http.chat(tools=[WEATHER], response_format={"type": "json_object"})
    grammar = engines.streams[-1].sampling.grammar
    assert isinstance(grammar, LarkGrammar)
    assert "answer" in grammar.text


def test_response_format_applies_after_reasoning(http: Any, engines: Any) -> None:
    engines.script = engines.answer('<think>opened</think>{"a": 1}')
    message = http.chat(response_format={"type": "json_object"})["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("opened", '{"a": 1}')
    assert engines.streams[-1].sampling.grammar_after == "</think>"
    assert engines.streams[-1].sampling.grammar_opening == "<think>"


@pytest.mark.parametrize("config", THINKERS, ids=THINKER_NAMES, indirect=True)
@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"structured_outputs": {"json": {"type": "object"}}}, '{"a": 1}'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "yes"),
    ],
    ids=["json_object", "schema", "choice", "regex"],
)
def test_response_format_applies_immediately_without_reasoning(
    http: Any, engines: Any, form: dict[str, Any], answer: str
) -> None:
    """Also where the format says that all answers begin inside: the model has no such token."""
    engines.script = engines.answer(answer)
    message = http.chat(**form, max_tokens=40)["choices"][0]["message"]
    assert message["content"] == answer
    assert not message.get("reasoning_content")
    sampling = engines.streams[-1].sampling
    assert (sampling.grammar_opening, sampling.grammar_after) == ("<think>", "</think>")
    assert sampling.grammar_budget == 30, "a quarter of the tokens is kept for the form"


@pytest.mark.parametrize("config", THINKERS, ids=THINKER_NAMES, indirect=True)
@pytest.mark.parametrize("choice", ["required", FORCED])
@pytest.mark.parametrize("streams", [False, True])
def test_call_without_reasoning_is_a_call(
    http: Any, engines: Any, choice: Any, streams: bool
) -> None:
    """Also where the format says that all answers begin inside the reasoning."""
    engines.script = engines.answer(CALL)
    message = answered(http, streams, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=200)
    assert message["tool_calls"] == [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
    assert not message.get("reasoning_content")
    assert not message.get("content")
    sampling = engines.streams[-1].sampling
    assert isinstance(sampling.grammar, LarkGrammar)
    assert (sampling.grammar_opening, sampling.grammar_after) == ("<think>", "</think>")
    assert sampling.grammar_budget > 0, "reasoning leaves room for the call"


@pytest.mark.parametrize("config", THINKERS, ids=THINKER_NAMES, indirect=True)
@pytest.mark.parametrize("think", [False, True], ids=["", "opened"])
@pytest.mark.parametrize("streams", [False, True])
def test_answer_starting_with_a_call_is_not_reasoning(
    http: Any, engines: Any, think: bool, streams: bool
) -> None:
    """The answer has no reasoning, although the format or the prompt opens it."""
    engines.script = engines.answer(f"\n{CALL}")
    fields = {"tools": [WEATHER, NOW], "chat_template_kwargs": {"think": think}}
    if streams:
        body = {"messages": [USER], **fields}
        message, reasons = added_up(http.stream("/v1/chat/completions", body))
        calls, reason = message["tool_calls"], reasons[-1]
    else:
        (choice,) = http.chat(**fields)["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
    assert not message.get("reasoning_content")
    assert not message.get("content")
    assert reason == "tool_calls"


@pytest.mark.parametrize("config", THINKERS[1:], ids=THINKER_NAMES[1:], indirect=True)
def test_call_quoted_in_reasoning_is_reasoning(http: Any, engines: Any) -> None:
    engines.script = engines.answer(f"I could write {CALL}.</think>No.")
    message = http.chat(tools=[WEATHER])["choices"][0]["message"]
    assert message["content"] == "No."
    assert "tool_calls" not in message
    assert message["reasoning_content"] == f"I could write {CALL}."


def test_no_calls_without_tools(http: Any, engines: Any) -> None:
    engines.script = engines.answer("<tool_call>x")
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = http.chat(**fields)["choices"]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("config", "start"),
    [
        (AnswerConfig(), "<tools>"),
        (AnswerConfig(exclude_tools_when_tool_choice_none=True), "<|user|>"),
    ],
    indirect=["config"],
)
def test_unused_tools_are_omitted_if_configured(http: Any, engines: Any, start: str) -> None:
    http.chat(tools=[WEATHER], tool_choice="none")
    assert prompt_of(engines).startswith(start)


def test_calls_and_their_results_are_rendered(http: Any, engines: Any) -> None:
    turn = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "now", "arguments": '{"b": 1, "a": 2}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
    http.chat(messages=[USER, turn, result], tools=[NOW])
    assert prompt_of(engines).endswith(
        '<|assistant|><think>hm</think><tool_call>now:{"b": 1, "a": 2}</tool_call><|end|>'
        "<|tool|>12:00<|end|><|assistant|>"
    )


def test_empty_list_of_calls_is_no_call(http: Any, engines: Any) -> None:
    template = "{% for m in messages %}{{ 'called' if 'tool_calls' in m else 'said' }}{% endfor %}"
    engines.tokenizer.chat_template = ChatTemplate(template, {})
    http.chat(messages=[USER, {"role": "assistant", "content": "x", "tool_calls": []}])
    assert prompt_of(engines) == "saidsaid"


def test_reasoning_is_returned_separately(http: Any, engines: Any) -> None:
    engines.script = engines.answer("hm, well</think>\n\nYes.")
    fields = {"chat_template_kwargs": {"think": True}}
    message = http.chat(**fields)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, well", "Yes.")
    message = http.chat(include_reasoning=False, **fields)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "Yes."
    engines.script = engines.answer("Yes.")
    message = http.chat()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == (None, None)


def test_call_at_end_of_unclosed_reasoning_is_a_call(http: Any, engines: Any) -> None:
    for end in ("", "</think>"):
        engines.script = engines.answer(f"<think>I ask.\n{CALL}{end}")
        (choice,) = http.chat(tools=[WEATHER])["choices"]
        assert choice["message"]["reasoning_content"] == "I ask."
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("config", [AnswerConfig()], indirect=True)
def test_reasoning_tags_are_detected_from_chat_template(http: Any, engines: Any) -> None:
    engines.script = engines.answer("<think>hm</think>Yes.")
    message = http.chat()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    model = http.get("/v1/models").json()["data"][0]
    assert (model["tool_call_parser"], model["reasoning_parser"]) == ("hermes", "qwen3")


@pytest.mark.parametrize("config", [AnswerConfig(reasoning_parser="none")], indirect=True)
def test_reasoning_stays_content_without_a_parser(http: Any, engines: Any) -> None:
    engines.script = engines.answer("<think>hm</think>Yes.")
    message = http.chat()["choices"][0]["message"]
    assert message["content"] == "<think>hm</think>Yes."
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    "config",
    [AnswerConfig(reasoning_parser="tags", reasoning_tags=("<r>", "</r>"))],
    indirect=True,
)
def test_tags_can_be_named(http: Any, engines: Any) -> None:
    engines.script = engines.answer("<r>hm</r>Yes.")
    message = http.chat()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")


@pytest.mark.parametrize(
    "config",
    [
        AnswerConfig(enable_auto_tool_choice=False),
        AnswerConfig(tool_call_parser="none"),
    ],
    indirect=True,
)
def test_tool_choice_auto_can_be_disabled(http: Any) -> None:
    response = http.post("/v1/chat/completions", {"messages": [USER], "tools": [WEATHER]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "answer",
    [
        AnswerConfig(reasoning_parser="tags"),
        AnswerConfig(reasoning_tags=("<a>", "</a>")),
        AnswerConfig(reasoning_parser="tags", reasoning_tags=("<a>",)),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    answer: AnswerConfig, engines: Any, tokenizer: ServedTokenizer
) -> None:
    config = FrontEndConfig(answer=answer)
    with pytest.raises(ValueError, match="--reasoning-tags"):
        app_of(config, engines, tokenizer)


def test_half_a_surrogate_pair_in_arguments_of_earlier_calls_is_replaced(
    http: Any, engines: Any
) -> None:
    """Models generate them, and clients send them back."""
    text = '{"city": "\\ud800", "whole": "\\ud83d\\ude00"}'
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": text}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = http.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}, turn]}
    )
    assert answer.status_code == 200, answer.text


def test_deeply_nested_call_name_is_no_call(http: Any, engines: Any) -> None:
    engines.context = 5000
    engines.script = engines.answer('<tool_call>{"name": ' + "[" * 1200 + "]" * 1200 + "}")
    (answer,) = http.chat(tools=[NOW])["choices"]
    assert not answer["message"].get("tool_calls")


@pytest.mark.parametrize("levels", [60, 70, 120, 150, 180])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_deeply_nested_parameters_are_refused_by_name(
    http: Any, engines: Any, levels: int, choice: str
) -> None:
    engines.context = 10_000
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        inner = {"type": "array", "items": inner}
    parameters = {"type": "object", "properties": {"a": inner}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    body = {
        "messages": [USER],
        "tool_choice": choice,
        "tools": [{"type": "function", "function": function}],
    }
    response = http.post("/v1/chat/completions", body)
    if levels > 100:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "tools"
    else:
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(("asked", "budget"), [(5, 5), (0, 1), (-1, None)])
def test_reasoning_can_have_a_budget(
    http: Any, engines: Any, asked: int, budget: int | None
) -> None:
    http.chat(thinking_token_budget=asked)
    sampling = engines.streams[-1].sampling
    if budget is None:
        assert sampling.grammar is None
    else:
        assert sampling.grammar == LarkGrammar("start: <[*]>*"), "the answer may be anything"
        assert (sampling.grammar_after, sampling.grammar_budget) == ("</think>", budget)
        assert sampling.grammar_opening == "<think>"
