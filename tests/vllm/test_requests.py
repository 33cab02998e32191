"""Requests as vLLM takes them, in vLLM's own environment."""

import json
import subprocess
from typing import Any

import pytest

from tests.vllm.stacks import PYTHON, ROOT

pytestmark = pytest.mark.vllm

PROGRAM = """
import json

from vllm import SamplingParams as Vllm
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

from engine.shared.messages import AddRequest, JsonSchemaGrammar, PoolingParams, SamplingParams
from engine.vllm.requests import Moves, NotOffered, core_request, structured

SCHEMA = '{"type": "array", "items": {"type": "string", "pattern": "^a+$"}, "uniqueItems": true}'
for lenient in (False, True):
    wanted = structured(JsonSchemaGrammar(SCHEMA, lenient=lenient))
    error = ""
    try:
        validate_guidance_grammar(Vllm(structured_outputs=wanted))
    except VLLMValidationError as refused:
        error = str(refused)
    print(json.dumps(error))

refused = {}
asked = {"pooling": PoolingParams(), "adapter": "mine"}
free_first = SamplingParams(
    max_tokens=1, seed=1, grammar=JsonSchemaGrammar("{}"), grammar_after="</think>"
)
for name, value in {**asked, "sampling": free_first}.items():
    fields = {"sampling": SamplingParams(max_tokens=1, seed=1), name: value}
    try:
        core_request(AddRequest(1, "x", 0, 0, [1], **fields), {}, None, Moves.RESUMED)
    except NotOffered as error:
        refused[name] = error.param
print(json.dumps(refused))
drawn = []
for seed_given in (True, False):
    sampling = SamplingParams(max_tokens=1, seed=7, seed_given=seed_given)
    message = AddRequest(1, "x", 0, 0, [1], sampling)
    drawn.append(core_request(message, {}, None, Moves.RESUMED).sampling_params.seed)
print(json.dumps(drawn))
"""


@pytest.fixture(scope="module")
def said() -> list[Any]:
    """What the program prints."""
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    return [json.loads(line) for line in done.stdout.splitlines()[-4:]]


def test_what_cannot_be_enforced_is_ignored_of_schemas_that_are_not_strict(
    said: list[Any],
) -> None:
    strict, lenient, *_ = said
    assert "uniqueItems" in strict
    assert lenient == ""


def test_what_vllm_engines_do_not_do_is_refused_by_the_parameter(said: list[Any]) -> None:
    assert said[2] == {
        "pooling": "model", "adapter": "model", "sampling": "response_format",
    }  # fmt: skip


def test_only_seeds_of_clients_are_passed_on(said: list[Any]) -> None:
    assert said[3] == [7, None]
