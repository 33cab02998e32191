"""Requests as vLLM takes them, in vLLM's own environment."""

import json
import subprocess

import pytest

from tests.vllm.stacks import PYTHON, ROOT

pytestmark = pytest.mark.vllm

PROGRAM = """
import json

from vllm import SamplingParams as Vllm
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

from engine.shared.messages import JsonSchemaGrammar
from engine.vllm.requests import structured

SCHEMA = '{"type": "array", "items": {"type": "string", "pattern": "^a+$"}, "uniqueItems": true}'
for lenient in (False, True):
    wanted = structured(JsonSchemaGrammar(SCHEMA, lenient=lenient))
    error = ""
    try:
        validate_guidance_grammar(Vllm(structured_outputs=wanted))
    except VLLMValidationError as refused:
        error = str(refused)
    print(json.dumps(error))
"""


def test_what_cannot_be_enforced_is_ignored_of_schemas_that_are_not_strict() -> None:
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    strict, lenient = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert "uniqueItems" in strict
    assert lenient == ""
