"""Each parameter is sent to both engines: docs/engines.md says whether they do the same."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.vllm.stacks import SCHEMA, complete, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.stack]

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"
PROMPT = prompts(1)[0]
CERTAIN = {"temperature": 1.0}
"""Draws at random, but from what these leave, which is one token."""


@pytest.fixture(scope="module")
def built_in() -> Iterator[RunningStack]:
    with RunningStack(
        "--data-parallel-size", "1", "--api-server-count", "1", "--max-model-len", "512",
        "--dtype", "float32", "--scheduling-policy", "priority", timeout=400,
    ) as running:  # fmt: skip
        yield running


def cases(greedy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of a request for each parameter, given the choice of one without."""
    ids = greedy["token_ids"]
    fourth = next(place for place in range(3, 12) if ids[place] not in ids[:place])

    return {
        "max_tokens": {"max_tokens": 5},
        "temperature": {"temperature": 1e-3, "top_k": 1},
        "top_k": {**CERTAIN, "top_k": 1},
        "top_p": {**CERTAIN, "top_p": 1e-6},
        "min_p": {**CERTAIN, "min_p": 1.0},
        "repetition_penalty": {"repetition_penalty": 2.0, "max_tokens": 100},
        "presence_penalty": {"presence_penalty": 2.0, "max_tokens": 100},
        "frequency_penalty": {"frequency_penalty": 2.0, "max_tokens": 100},
        "min_tokens": {"min_tokens": 9, "stop_token_ids": [ids[fourth]]},
        "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 100}, "max_tokens": 3},
        "stop": {"stop": [greedy["text"][6:9]]},
        "stop_token_ids": {"stop_token_ids": [ids[fourth]]},
        "logit_bias": {"logit_bias": {str(ids[0]): -100}},
        "allowed_token_ids": {"allowed_token_ids": list(range(300, 400))},
        "bad_words": {"bad_words": [greedy["text"].split()[0]]},
        "logprobs": {"logprobs": 3},
        "logprob_token_ids": {"logprobs": 2, "logprob_token_ids": [ids[0], 300]},
        "prompt_logprobs": {"prompt_logprobs": 2},
        "n": {"n": 2},
        "seed": {"temperature": 1.0, "seed": 5},
        "cache_salt": {"cache_salt": "pepper"},
        "priority": {"priority": 1},
        "response_format": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            },
            "max_tokens": 300,
        },
        "structured_outputs.json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 300},
        "structured_outputs.json_object": {"structured_outputs": {"json_object": True}},
        "structured_outputs.regex": {"structured_outputs": {"regex": "[a-f]{6}"}},
        "structured_outputs.choice": {"structured_outputs": {"choice": ["thou art", "I am"]}},
        "structured_outputs.grammar": {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        "structured_outputs.whitespace_pattern": {
            "structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}
        },
    }


AS_WITHOUT = {"temperature", "top_k", "top_p", "min_p", "cache_salt", "priority"}
"""The choice is that of a request without the parameter."""


VALID: dict[str, Callable[[str], object]] = {
    "response_format": lambda text: set(json.loads(text)) == {"name", "old"},
    "structured_outputs.json": lambda text: set(json.loads(text)) == {"name", "old"},
    "structured_outputs.json_object": lambda text: text.lstrip().startswith("{"),
    "structured_outputs.regex": lambda text: re.fullmatch("[a-f]{6}", text),
    "structured_outputs.choice": lambda text: text in ("thou art", "I am"),
    "structured_outputs.grammar": lambda text: text in ("yes", "no"),
}
"""What outputs are held to; the backends of grammars may choose other tokens within it."""


def sent(url: str, fields: dict[str, Any]) -> Any:
    """Return the choices of an answer, or the name of the parameter that is refused."""
    answer = complete(url, PROMPT, **{"max_tokens": 12, "return_token_ids": True, **fields})
    if isinstance(answer, dict):
        names = ("text", "token_ids", "finish_reason", "logprobs", "prompt_logprobs")
        return [{name: each.get(name) for name in names} for each in answer["choices"]]
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


def shown(choices: list[dict[str, Any]]) -> list[Any]:
    """Return what an answer shows beside probabilities."""
    return [[each["text"], each["token_ids"], each["finish_reason"]] for each in choices]


def numbers(choices: list[dict[str, Any]]) -> list[float]:
    """Return all numbers of what an answer says about probabilities, by size."""

    def of(value: Any) -> list[float]:
        if isinstance(value, dict | list):
            parts = value.values() if isinstance(value, dict) else value
            return [number for each in parts for number in of(each)]
        return [float(value)] if isinstance(value, float | int) else []

    return sorted(
        number for each in choices for number in of([each["logprobs"], each["prompt_logprobs"]])
    )


def documented() -> dict[str, str]:
    """Return what docs/engines.md says of each parameter: same, mapped or refused."""
    found: dict[str, str] = {}
    for names, verdict in re.findall(r"^\| (`.*?) \| (\w+)", DOCUMENT.read_text(), re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), verdict)
    return found


def test_both_engines_treat_parameters_as_in_the_table(
    served: RunningStack, built_in: RunningStack
) -> None:
    [greedy] = sent(built_in.url, {})
    verdicts, ineffective, far = dict[str, str](), [], []
    for name, fields in cases(greedy).items():
        ours, theirs = (sent(url, fields) for url in (built_in.url, served.url))
        assert isinstance(ours, list), f"{name}: the built-in engine refuses {ours}"
        if not isinstance(theirs, list):
            verdicts[name] = "refused" if theirs else "refused without its name"
            continue
        without = {key: value for key, value in fields.items() if key != name.split(".")[0]}
        before = [greedy] if name in (*AS_WITHOUT, "seed") else sent(built_in.url, without)
        ineffective += [
            f"{name} of the {whose}: {choices}"
            for whose, choices in (("built-in engine", ours), ("vLLM engine", theirs))
            if (choices == before) != (name in AS_WITHOUT)
        ]
        if name in VALID:
            verdicts[name] = "mapped"
            assert all(VALID[name](each[0]["text"]) for each in (ours, theirs)), f"{ours} {theirs}"
            continue
        is_same = shown(ours) == shown(theirs)
        verdicts[name] = "same" if is_same else "mapped"
        if is_same and numbers(ours) != pytest.approx(numbers(theirs), abs=2e-3):
            far.append(f"{name}: {ours} {theirs}")
    assert (verdicts, ineffective, far) == (documented(), [], [])
