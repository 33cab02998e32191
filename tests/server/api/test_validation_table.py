"""Accepted and rejected values of each field and endpoint: types, ranges and combinations.

A rejected value results in a 400 that names the field, regardless of other fields.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.shared.config import ModelConfig
from server.config import FrontEndConfig, HttpConfig
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import FakeGenerationClient, app_of

USER = {"role": "user", "content": "hello"}
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
R = {"type": "function", "name": "f", "parameters": {"type": "object"}}
M = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
UNKNOWN_TYPE = {"properties": {"a": {"type": "strin"}}}
REFUSAL = {"type": "refusal", "refusal": "no"}
SEARCH = {"type": "web_search"}

KEYS = {f"k{number}": 1 for number in range(4096)}
TOOLS = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1025)]
CALL = {"function": {"name": "f", "arguments": "{}"}}

ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "batch": ("/v1/chat/completions/batch", {"messages": [[USER]]}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": [USER]}),
    "tokenize": ("/tokenize", {"prompt": "hello"}),
    "detokenize": ("/detokenize", {"tokens": [1, 2]}),
}

NUMBERS: list[Any] = ["1", True, [], {}]
"""Values that are not numbers."""
TEXTS: list[Any] = [1, True, [], {}]
"""Values that are not strings."""
SWITCHES: list[Any] = ["true", 1, [], {}]
"""Values that are not booleans."""

Values = tuple[str, str, list[Any], list[Any]]
"""Endpoints, a field, accepted values and rejected values.

The first endpoint is tested with all values, the others with some.
"""

FIELDS: list[Values] = [
    ("completions chat batch responses messages", "temperature",
        [None, 0, 0.0, 1, 2.0], [-0.01, 2.01, 1e308, *NUMBERS]),
    ("completions chat batch responses messages", "top_p",
        [None, 1e-9, 1, 0.5], [0, -0.1, 1.01, *NUMBERS]),
    ("completions chat responses", "top_k", [None, -1, 0, 5, 2**31 - 1], [-2, 2**31, 1.5, "5"]),
    ("messages", "top_k", [None, 1, 50], [-2, 1.5, "5"]),
    ("completions chat responses", "min_p", [None, 0, 1, 0.05], [-0.1, 1.1, "0"]),
    ("completions chat responses", "presence_penalty", [None, -2, 2], [-2.1, 2.1, "0"]),
    ("completions chat responses", "frequency_penalty", [None, -2, 2], [-2.1, 2.1, "0"]),
    ("completions chat responses", "repetition_penalty", [None, 0.01, 1, 100], [0, -1, 101, "1"]),
    ("completions chat responses messages", "seed",
        [None, 0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.5, "1"]),
    ("completions chat", "n", [None, 1, 128], [0, -1, 129, 1.0, "1"]),
    ("batch", "n", [None, 1], [2, 0, "1"]),
    ("completions chat responses", "min_tokens", [None, 0, 3], [-1, 1.5, "1", 10**12]),
    ("completions", "max_tokens", [None, 1, 10], [0, -1, 10**12, 1.5, "1"]),
    ("chat batch", "max_tokens", [None, 1, 10], [0, -1, 10**12, 1.5, "1"]),
    ("chat batch", "max_completion_tokens", [None, 1, 10], [0, -1, 10**12, 1.5, "1"]),
    ("responses", "max_output_tokens", [None, 1, 10], [0, -1, 10**12, 1.5, "1"]),
    ("messages", "max_tokens", [1, 10], [None, 0, -1, 10**12, "1"]),
    ("completions chat responses", "ignore_eos", [None, False, True], SWITCHES),
    ("completions chat responses messages", "stream", [None, False], SWITCHES),
    ("batch", "stream", [None, False], [True, "true"]),
    ("completions chat", "skip_special_tokens", [None, True, False], SWITCHES),
    ("completions chat", "include_stop_str_in_output", [None, True, False], SWITCHES),
    ("completions chat", "return_token_ids", [None, True, False], SWITCHES),
    ("completions chat", "return_tokens_as_token_ids", [None, True, False], SWITCHES),
    ("completions chat responses", "stop",
        [None, "x", [], ["a", "b", "c", "d"], ["x"] * 128, ["x" * 256] * 16],
        ["", [""], ["x"] * 129, ["x" * 241] * 17, "x" * 257, 1, True, {}, [1], [None]]),
    ("messages", "stop_sequences", [None, [], ["a"]], ["a", [""], ["x"] * 129, [1], {}]),
    ("completions chat responses", "stop_token_ids",
        [None, [], [5]], [[-1], [10**9], ["5"], 5, [1.5], {}]),
    ("completions chat", "allowed_token_ids", [None, [5]], [[], [-1], [10**9], ["5"], 5]),
    ("completions chat", "bad_words", [None, [], ["x" * 128], ["fox"] * 1024],
        [[""], [" "], "fox", [1], ["x" * 129], ["x"] * 1025]),
    ("completions chat responses", "logit_bias",
        [None, {}, {"5": 1, "6": -100}],
        [{"5": 101}, {"5": "1"}, {"x": 1}, {"-1": 1}, {"999999": 1}, [], "5"]),
    ("completions", "logprobs", [None, 0, 5], [-2, 6, True, "1", 1.5]),
    ("completions", "echo", [None, True, False], SWITCHES),
    ("completions", "best_of", [None, 1, 2], [0, -1, 10**6, "1"]),
    ("completions", "suffix", [None, ""], ["x", 1]),
    ("completions", "prompt",
        ["x", ["x", "y"], [1, 2], [[1], [2, 3]]],
        [None, "", [], [""], [[]], [-1], [10**9], [1.5], ["x", 1], {}, 1, True, [None]]),
    ("completions chat", "prompt_logprobs", [None, 0, 5], [-2, 6, "1", True]),
    ("completions chat", "truncate_prompt_tokens", [None, -1, 5], [0, -2, "1", 1.5]),
    ("completions chat", "truncation_side", [None, "left", "right"], ["middle", 1]),
    ("completions chat", "priority", [None, 0, -5], [2**31, 1.5, "0"]),
    ("completions chat responses messages", "cache_salt",
        [None, "s" * 256, "\0é"], ["", "x" * 257, 1, []]),
    ("completions chat responses", "request_id", [None, "name-1"], ["", "a b", "é", "x" * 300, 1]),
    ("completions chat", "user", [None, "me"], [1, [], {}]),
    ("completions chat batch responses messages", "model", ["tiny"], [1, [], {}]),
    ("completions chat", "stream_options", [None], [{"include_usage": True}, 1, "x", []]),
    ("completions chat", "use_beam_search", [None, False], SWITCHES),
    ("completions chat", "length_penalty", [None, 10, -10.0], ["1", True, 10.1, -10.1]),
    ("completions chat", "early_stopping", [None, True, False, "never"], ["always", 1, []]),
    ("completions chat", "response_format",
        [None, {"type": "text"}, {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}],
        [{}, {"type": "xml"}, {"type": "json_schema"}, "text", [],
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1}}},
            {"type": "structural_tag"}]),
    ("completions chat responses", "structured_outputs",
        [None, {"json": SCHEMA}, {"json": "{}"}, {"regex": "a+"}, {"choice": ["a"]},
            {"grammar": 'root ::= "a"'}, {"json_object": True},
            {"structural_tag": {"format": {"type": "any_text"}}}],
        [{}, {"json": 1}, {"json": "{"}, {"regex": "("}, {"regex": ""}, {"choice": []},
            {"choice": [""]}, {"choice": "a"}, {"grammar": "?"}, {"json_object": False},
            {"regex": "a", "choice": ["a"]}, {"unknown": 1}, "json", {"structural_tag": {}}]),
    ("chat batch", "messages",
        [], [None, [], "hello", [1], {}, [[]], [{"role": 7, "content": "x"}]]),
    ("chat", "messages",
        [[{"role": "system", "content": "x"}, USER], [{"role": "user", "content": []}],
            *([USER, {"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": arguments}}]}]
                for arguments in ("{}", "{", "", "null", "[]", None))],
        [[{"role": "user"}], [{"role": "user", "content": 1}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]]),
    ("chat", "logprobs", [None, True, False], ["true", 1, 5]),
    ("chat", "top_logprobs", [None], [1, -2, "1", 6]),
    ("chat", "tools", [None, [], [F]],
        [[{}], [1], {}, [{"type": "function"}], [{"type": "other", "function": {"name": "f"}}],
            [{"type": "function", "function": {"name": "a b"}}],
            [{"type": "function", "function": {"name": "f", "parameters": []}}], [F] * 200]),
    ("chat", "tool_choice", [None, "none", "auto"],
        ["required", "sometimes", 1, {"type": "function"},
            {"type": "function", "function": {"name": "f"}}]),
    ("chat", "parallel_tool_calls", [None, True, False], SWITCHES),
    ("chat", "verbosity", [None, "low", "high"], ["enormous", 1, []]),
    ("chat", "reasoning_effort", [None, "none", "low", "max"], ["enormous", 1, []]),
    ("chat", "thinking_token_budget", [None, -1, 0, 5], [-2, 1.5, "1"]),
    ("chat", "include_reasoning", [None, True, False], SWITCHES),
    ("chat", "chat_template_kwargs",
        [None, {}, KEYS], [[], "x", {"messages": []}, {**KEYS, "more": 1}]),
    ("chat", "documents", [None, [], [{"text": "x"}]], ["x", [1], {}]),
    ("chat", "add_generation_prompt", [None, True, False], SWITCHES),
    ("chat", "chat_template", [None], ["{{ x }}", "", 1]),
    ("responses", "input",
        ["x", [], [USER], [{"type": "reasoning", "summary": []}, USER],
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]],
        [None, 1, {}, [1], [{"role": 7, "content": "x"}], [{"type": "unknown"}],
            [{"type": "function_call", "call_id": "c", "name": "f"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            [{"type": "item_reference", "id": "msg_1"}]]),
    ("responses", "instructions", [None, "x"], TEXTS),
    ("responses", "metadata", [None, {}, {"a": "b"}], [[], "x", {"a": 1}]),
    ("responses", "text",
        [None, {}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
        [{"format": {"type": "xml"}}, {"format": {"type": "json_schema"}}, 1, "text"]),
    ("responses", "reasoning", [None, {}, {"effort": "low"}], [{"effort": "huge"}, 1, "low"]),
    ("responses", "truncation", [None, "auto", "disabled"], ["left", 1]),
    ("responses", "include", [None, [], ["reasoning.encrypted_content"]], ["x", ["x"], [1], {}]),
    ("responses", "tools",
        [None, [], [R], [{"type": "custom", "name": "c"}], [{"type": "web_search"}],
            [{"type": "namespace", "name": "n", "tools": [R]}]],
        [[{}], [{"type": "namespace", "name": "n", "tools": [1]}], [{"type": "function"}], 1, {},
            [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark"}}]]),
    ("responses", "tool_choice", [None, "none", "auto"],
        ["required", "sometimes", 1, {"type": "function", "name": "f"}]),
    ("responses", "top_logprobs", [None, 0, 5], [-1, 6, "1"]),
    ("responses", "store", [None, False], [True, "x", 1]),
    ("responses", "background", [None, False], [True, "x", 1]),
    ("responses", "previous_response_id", [None], ["resp_1", 1]),
    ("responses", "prompt", [None], [{"id": "p"}, "x"]),
    ("messages", "messages",
        [[USER], [USER, {"role": "assistant", "content": "x"}],
            [USER, {"role": "system", "content": "x"}]],
        [None, [], "x", [{"role": "developer", "content": "x"}], [{"role": "user"}], [1],
            [{"role": "user", "content": [{"type": "image", "source": {}}]}]]),
    ("messages", "system", [None, "x", [{"type": "text", "text": "x"}]], [1, [1], {}]),
    ("messages", "tools", [None, [], [M], [{"type": "bash_20250124", "name": "bash"}]],
        [[{}], [1], {}]),
    ("messages", "tool_choice", [None, {"type": "none"}],
        ["auto", {}, {"type": "sometimes"}, {"type": "tool"}]),
    ("messages", "thinking", [None, {"type": "disabled"}], [{}, {"type": "x"}, 1, "enabled"]),
    ("messages", "metadata", [None, {}, {"user_id": "me"}], [1, "x", {"user_id": 1}]),
    ("tokenize", "prompt", ["x", ""], [None, 1, [], {}]),
    ("tokenize", "add_special_tokens", [None, True, False], SWITCHES),
    ("tokenize", "return_token_strs", [None, True, False], SWITCHES),
    ("detokenize", "tokens", [[], [1]], [None, [-1], [10**9], ["1"], "x", [1.5], {}]),
    ("detokenize", "skip_special_tokens", [None, True, False], SWITCHES),
]  # fmt: skip

Combination = tuple[str, dict[str, Any], str | None]
"""An endpoint, fields, and the field named in the error; None: the combination is valid."""

COMBINATIONS: list[Combination] = [
    ("completions", {"max_tokens": 0, "echo": True}, None),
    ("completions", {"stop": ["a", 5]}, "stop[1]"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias.5"),
    ("completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("completions", {"prompt": [[]]}, "prompt[0]"),
    ("completions", {"prompt": ["hello", 5]}, "prompt[1]"),
    ("completions", {"prompt": [5, -1]}, "prompt[1]"),
    ("completions", {"n": 2, "best_of": 1}, "best_of"),
    ("completions", {"n": 2, "best_of": 3, "stream": True}, "best_of"),
    ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("completions", {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ("completions", {"max_tokens": 511}, "max_tokens"),
    ("completions", {"prompt": [5] * 600}, "prompt"),
    ("completions", {"prompt": [5] * 600, "truncate_prompt_tokens": 5}, None),
    ("completions", {"prompt": ["x"] * 3000, "n": 128}, "prompt"),
    ("completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
    ("completions", {"logprob_token_ids": [5], "logprobs": 0}, None),
    ("completions", {"logprob_token_ids": [5], "logprobs": 0, "echo": True}, "logprob_token_ids"),
    ("completions", {"use_beam_search": True, "n": 2, "temperature": 0}, None),
    ("completions", {"use_beam_search": True, "top_k": 5}, "top_k"),
    ("completions", {"use_beam_search": True, "stream": True}, "stream"),
    ("completions", {"use_beam_search": True, "n": 2, "logit_bias": {"5": 1}}, "logit_bias"),
    ("completions", {"structured_outputs": {"regex": "a"},
        "response_format": {"type": "json_object"}}, "structured_outputs"),
    ("completions", {"structured_outputs": {"regex": "a"},
        "response_format": {"type": "text"}}, None),
    ("completions", {"stream": True, "stream_options": {"include_usage": True}}, None),
    ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ("completions", {"max_tokens": 5, "max_completion_tokens": 7}, None),
    ("chat", {"logprobs": True, "top_logprobs": 5}, None),
    ("chat", {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ("chat", {"tools": [F], "tool_choice": "auto"}, None),
    ("chat", {"tools": [F], "tool_choice": "required"}, None),
    ("chat", {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "f"}}}, None),
    ("chat", {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice"),
    ("chat", {"tools": [F], "structured_outputs": {"regex": "a"},
        "tool_choice": {"type": "function", "function": {"name": "f"}}}, "structured_outputs"),
    ("chat", {"tools": [F, F]}, "tools"),
    ("chat", {"tools": TOOLS}, "tools"),
    ("responses", {"tools": [{**R, "name": f"f{number}"} for number in range(1025)]}, "tools"),
    ("messages", {"tools": [{**M, "name": f"f{number}"} for number in range(1025)]}, "tools"),
    ("chat", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 129}]},
        "messages[1].tool_calls"),
    ("chat", {"tools": [F], "use_beam_search": True}, "tools"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": False}, None),
    ("chat", {"max_tokens": 5, "max_completion_tokens": 7}, None),
    ("chat", {"max_completion_tokens": 511}, "max_completion_tokens"),
    ("chat", {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ("chat", {"n": 100, "logprobs": True, "top_logprobs": 5, "max_tokens": 400}, "top_logprobs"),
    ("chat", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, None),
    ("batch", {"messages": [[USER], [USER]], "tools": [F]}, "tools"),
    ("batch", {"messages": [[USER], [USER]], "use_beam_search": True}, "use_beam_search"),
    ("responses", {"tools": [R], "tool_choice": "required"}, None),
    ("responses", {"tools": [R], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ("responses", {"max_output_tokens": 511}, "max_output_tokens"),
    ("responses", {"text": {"format": {"type": "json_object"}},
        "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("responses", {"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
    ("messages", {"tools": [M], "tool_choice": {"type": "any"}}, None),
    ("messages", {"tools": [M], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ("messages", {"max_tokens": 511}, "This model's maximum context length"),
    ("tokenize", {"messages": [USER]}, "prompt"),
    ("completions", {"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ("completions", {"use_beam_search": True, "stop": "x"}, "stop"),
    ("completions", {"use_beam_search": True,
        "response_format": {"type": "json_object"}}, "response_format"),
    ("completions", {"use_beam_search": True, "n": 33}, "n"),
    ("completions", {"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ("completions", {"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    *(("chat", {"messages": [USER, said]}, f"messages[1]{field}") for said, field in (
        ({"role": 7, "content": "x"}, ".role"),
        ({"content": "x"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "text": ""}]}, ".content[0]"),
        ({"role": "user", "content": [REFUSAL]}, ".content[0]"),
        ({"role": "user", "content": "x", "refusal": "no"}, ".refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]},
            ".content[0].refusal"),
        ({"role": "assistant", "function_call": {"name": "x"}}, ".function_call"),
        *(({"role": "assistant", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": deep}}]},
            ".tool_calls[0].function.arguments") for deep in ("[" * 10**5, '{"a":' + "[" * 10**5)),
    )),
    ("chat", {"functions": []}, "functions"),
    ("chat", {"function_call": "auto"}, "function_call"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    *(("chat", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "strict": True, "schema": schema}}}, "response_format.json_schema.schema")
        for schema in ({"type": "objec"}, {"type": "array", "uniqueItems": True})),
    *(("chat", {"structured_outputs": {form: wrong}}, f"structured_outputs.{form}")
        for form, wrong in (("regex", "[a-"), ("grammar", "?"), ("choice", []), ("json", "{"))),
    ("chat", {"tools": None, "tool_choice": "none"}, None),
    ("chat", {"tools": [], "tool_choice": "required"}, "tool_choice"),
    ("chat", {"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
    ("chat", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    *(("chat", {"tools": [F, {"type": "function", "function": function}], "tool_choice": choice},
        f"tools[1].function.{field}") for function, choice, field in (
            ({}, "auto", "name"),
            ({"name": "a b"}, "auto", "name"),
            ({"name": "f"}, "auto", "name"),
            ({"name": "a", "parameters": 5}, "auto", "parameters"),
            ({"name": "a", "parameters": UNKNOWN_TYPE, "strict": True}, "auto", "parameters"),
            ({"name": "a", "parameters": UNKNOWN_TYPE}, "required", "parameters"),
        )),
    *(("chat", {"logprobs": True, "logprob_token_ids": ids, **more}, name) for ids, more, name in (
        ([1], {"logprobs": False}, "logprob_token_ids"),
        ([1, 1], {}, "logprob_token_ids"),
        ([999], {}, "logprob_token_ids"),
        ([-1], {}, "logprob_token_ids[0]"),
        ([*range(2000)], {}, "logprob_token_ids"),
        ([*range(330)], {"n": 8, "max_tokens": 500}, "logprob_token_ids"),
    )),
    ("batch", {"messages": [[]]}, "messages[0]"),
    ("batch", {"messages": [USER]}, "messages[0]"),
    ("batch", {"messages": [[USER], [{"role": "user"}]]}, "messages[1][0].content"),
    ("batch", {"messages": [[USER], [{**USER, "content": "word " * 2000}]]}, "messages"),
    ("batch", {"messages": [[USER]] * 5000}, "messages"),
    ("responses", {"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
    ("responses", {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].image_url"),
    ("responses", {"input": [{"role": "user", "content": [REFUSAL]}]}, "input[0].content[0]"),
    ("responses", {"input": "word " * 600}, "input"),
    ("responses", {"conversation": "conv_1"}, "conversation"),
    ("responses", {"include": ["everything"]}, "include[0]"),
    ("responses", {"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ("responses", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("responses", {"tools": [], "tool_choice": "auto"}, None),
    ("responses", {"tools": [{"type": "custom"}]}, "tools[0].name"),
    ("responses", {"tools": [{"type": "function"}]}, "tools[0].name"),
    ("responses", {"tools": [R, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ("responses", {"tools": [R, R]}, "tools[1].name"),
    ("responses", {"tools": [SEARCH, {"type": "namespace", "name": "n",
        "tools": [{"type": "function"}]}]}, "tools[1].tools[0].name"),
    *(("responses", {"tools": [SEARCH], "tool_choice": choice}, "tool_choice") for choice in (
        "required", {"type": "web_search"}, {"type": "web_search", "name": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    )),
    ("responses", {"input": [{**CALL["function"], "type": "function_call", "call_id": "1"}] * 129},
        "input[128]"),
    ("responses", {"tools": [R, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    *(("responses", {"tools": [{"type": "custom", "name": "shell", "format": form}], **more}, name)
        for form, more, name in (
            ({"type": "text", "x": 1}, {"tool_choice": 1}, "tool_choice"),
            ({"type": "grammar"}, {}, "tools[0].format"),
            ({"type": "json"}, {}, "tools[0].format.type"),
            ({"type": "grammar", "syntax": "lark", "definition": "start: <x>"}, {},
                "tools[0].format"),
            ({"type": "grammar", "syntax": "lark", "definition": "start: b"}, {},
                "tools[0].format"),
            ({"type": "grammar", "syntax": "regex", "definition": "("}, {}, "tools[0].format"),
        )),
    ("detokenize", {"tokens": [10**30]}, "tokens"),
]  # fmt: skip


Case = tuple[dict[str, Any], str | None]
"""Fields of a request, and the one that its error names; None if it is accepted."""


def cases() -> Iterator[Any]:
    """Return the cases of each field of each endpoint, and the combinations of each endpoint."""
    for endpoints, field, good, bad in FIELDS:
        for place, endpoint in enumerate(endpoints.split()):
            most = None if place == 0 else 2  # that they have the field, and it is the same
            table: list[Case] = [({field: value}, None) for value in good[:most]]
            table += [({field: value}, field) for value in bad[:most]]
            yield pytest.param(endpoint, table, id=f"{endpoint}-{field}")
    for endpoint in ENDPOINTS:
        table = [(fields, blamed) for name, fields, blamed in COMBINATIONS if name == endpoint]
        yield pytest.param(endpoint, table, id=f"{endpoint}-combinations")


class Asked:
    """One application and one event loop for all cases."""

    def __init__(self, tokenizer: ServedTokenizer, runner: asyncio.Runner) -> None:
        config = FrontEndConfig(model=ModelConfig(model="tiny"), http=HttpConfig(max_logprobs=5))
        engines = FakeGenerationClient(tokenizer)
        app = app_of(config, engines, tokenizer)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://swell")
        self._runner = runner

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._runner.run(self._client.post(path, json=body))


@pytest.fixture(scope="module")
def asked(tokenizer: ServedTokenizer) -> Iterator[Asked]:
    with asyncio.Runner() as runner:
        yield Asked(tokenizer, runner)


@pytest.mark.parametrize(("endpoint", "table"), cases())
def test_values_are_accepted_or_blamed(asked: Asked, endpoint: str, table: list[Case]) -> None:
    path, body = ENDPOINTS[endpoint]
    wrong = []
    for fields, blamed in table:
        answer = asked.post(path, {**body, **fields})
        if not is_as_expected(endpoint, answer, blamed):
            wrong.append((f"{fields!r:.120}", blamed, f"{answer.status_code} {answer.text:.300}"))
    assert not wrong


def is_as_expected(endpoint: str, answer: httpx.Response, blamed: str | None) -> bool:
    if blamed is None:
        return answer.status_code == 200
    if answer.status_code != 400:
        return False
    error = answer.json()["error"]
    named = error.get("param", error["message"])  # Anthropic's errors have no param
    # Chat completions have messages, the API of responses has not.
    is_translated = endpoint != "responses" or "messages[" not in error["message"]
    return (
        error["type"] == "invalid_request_error"
        and named is not None
        and named.startswith(blamed)
        and is_translated
    )
