"""Outputs of a whole stack follow what their requests ask for."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import MODEL

pytestmark = pytest.mark.stack

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", 3]}, "maxItems": 3},
        "address": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"street": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}},
                    "required": ["street"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


PLAYER: dict[str, Any] = {
    "type": "object",
    "properties": {key: PERSON["properties"][key] for key in ("name", "age")},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    url = f"{stack.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=90) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"temperature": 1.0, "max_tokens": 800} | fields
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who goes there?"}],
        **fields,
    )


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True, **more},
    }


def test_random_model_follows_the_schema(client: openai.OpenAI) -> None:
    def ask(seed: int) -> Any:
        return chat(client, seed=seed, response_format=schema_format(PERSON)).choices[0]

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(ask, range(8)))
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert len({choice.message.content for choice in choices}) > 6


def test_the_parse_helper_of_the_client_returns_objects(client: openai.OpenAI) -> None:
    class Player(pydantic.BaseModel):
        part: Literal["king", "fool"]
        lines: int = pydantic.Field(ge=0, le=99)

    class Cast(pydantic.BaseModel):
        players: list[Player] = pydantic.Field(min_length=1, max_length=2)

    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Name the cast."}],
        response_format=Cast,
        max_tokens=600,
        seed=5,
    )
    cast = completion.choices[0].message.parsed
    assert isinstance(cast, Cast)


def test_json_object_format_gives_an_object(client: openai.OpenAI) -> None:
    seen = 0
    for seed in range(3):
        answer = chat(
            client,
            seed=seed,
            temperature=0.5,
            max_tokens=200,
            response_format={"type": "json_object"},
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content), dict)
            seen += 1
    assert seen


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[A-Z]{2}-\d{3}"}, r"[A-Z]{2}-[0-9]{3}"),
        ({"choice": ["to be", "not to be", "à la carte 🎭"]}, "to be|not to be|à la carte 🎭"),
        ({"grammar": 'root ::= "a" [0-9]+ ("," [0-9]+){2} "b"'}, "a[0-9]+,[0-9]+,[0-9]+b"),
        ({"grammar": 'start: "<x>" /[a-f]{4}/ "</x>"'}, "<x>[a-f]{4}</x>"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
        ({"json": {"const": {"a": [1, 2]}}, "disable_any_whitespace": True}, r'\{"a":\[1,2\]\}'),
    ],
    ids=str,
)
def test_vllm_constraints_are_enforced(
    client: openai.OpenAI, constraint: dict[str, Any], pattern: str
) -> None:
    completion = client.completions.create(
        model=MODEL,
        prompt="ROMEO:",
        max_tokens=60,
        n=4,
        seed=3,
        temperature=1.0,
        extra_body={"structured_outputs": constraint},
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text), choice.text


def test_grammars_combine_with_all_other_parameters(client: openai.OpenAI) -> None:
    common = {"seed": 11, "response_format": schema_format(PLAYER)}
    plain = chat(client, **common).choices[0].message.content
    scored = chat(client, logprobs=True, top_logprobs=2, **common).choices[0]
    assert scored.message.content == plain
    assert "".join(token.token for token in scored.logprobs.content) == plain
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True, **common)
    )
    assert streamed == plain
    several = chat(client, n=3, **common)
    assert several.choices[0].message.content == plain
    for choice in several.choices:
        jsonschema.validate(json.loads(choice.message.content), PLAYER)
    unlikely = chat(
        client,
        extra_body={"min_tokens": 500, "repetition_penalty": 1.3, "top_k": 5},
        logit_bias={"5": 50},
        presence_penalty=0.5,
        **common,
    )
    assert unlikely.choices[0].finish_reason == "stop", "what is complete ends before min_tokens"
    jsonschema.validate(json.loads(unlikely.choices[0].message.content), PLAYER)
    endless = chat(client, extra_body={"ignore_eos": True}, **common)
    assert endless.choices[0].message.content == plain
    stopped = chat(client, stop=['"age"'], **common).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == plain.split('"age"')[0]
