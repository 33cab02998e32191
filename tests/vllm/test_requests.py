"""Requests as vLLM takes them, in vLLM's own environment."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.stacks import PYTHON, ROOT

pytestmark = pytest.mark.vllm

PROGRAM = """
import json
import os

from vllm import SamplingParams as Vllm
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

import engine.vllm.core
from engine.shared.config import EngineConfig
from engine.shared.cpu.lists import read_lists
from engine.shared.messages import AddRequest, JsonSchemaGrammar, PoolingParams, SamplingParams
from engine.vllm.core import _compute_whole_prompts, _thread_settings
from engine.vllm.requests import Continuation, UnsupportedParameter, core_request, structured

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
for name, value in {"pooling": PoolingParams(), "adapter": "mine"}.items():
    fields = {"sampling": SamplingParams(max_tokens=1, seed=1), name: value}
    try:
        message = AddRequest(1, "x", 0, 0, [1], **fields)
        core_request(message, {}, None, Continuation.RESUMED, {}, None)
    except UnsupportedParameter as error:
        refused[name] = error.param
print(json.dumps(refused))
drawn = []
for seed_given in (True, False):
    sampling = SamplingParams(max_tokens=1, seed=7, seed_given=seed_given)
    message = AddRequest(1, "x", 0, 0, [1], sampling)
    request = core_request(message, {}, None, Continuation.RESUMED, {}, None)
    drawn.append(request.sampling_params.seed)
print(json.dumps(drawn))
too_short = {"long_prefill_token_threshold": 5}
try:
    _compute_whole_prompts(too_short)
except ValueError as error:
    print(json.dumps(str(error)))
bound = []
for cores, lists, layout in (
    ("0-1", "none", (1, 1, 0)), ("0-1", "none", (1, 2, 0)), ("0-4", "none", (2, 2, 1)),
    ("0-5", "none", (1, 2, 2)), ("0-3", "0|3", (2, 1, 0)), ("0-3", "3", (1, 1, 0)),
):
    (cpus,) = read_lists(cores)
    os.sched_getaffinity = lambda _, cpus=cpus: set(cpus)
    os.sched_setaffinity = lambda *_: None
    engine.vllm.core.cpu_quota = lambda: None
    processes, engines, number = layout
    config = EngineConfig().changed(
        executor={"cpu_bind": lists},
        parallel={
            "tensor_parallel_size": processes, "data_parallel_size_local": engines,
            "data_parallel_rank_local": number,
        },
    )
    settings = _thread_settings(config)
    bound.append("here" if "VLLM_ENABLE_V1_MULTIPROCESSING" in settings
                 else " ".join(settings.values()))
print(json.dumps(bound))
"""


@pytest.fixture(scope="module")
def said() -> list[Any]:
    """What the program prints."""
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    return [json.loads(line) for line in done.stdout.splitlines()[-6:]]


def test_unenforceable_parts_of_non_strict_schemas_are_ignored(
    said: list[Any],
) -> None:
    strict, lenient, *_ = said
    assert "uniqueItems" in strict
    assert lenient == ""


def test_unsupported_requests_are_refused_by_parameter(said: list[Any]) -> None:
    assert said[2] == {"pooling": "model", "adapter": "model"}


def test_only_client_seeds_are_passed_on(said: list[Any]) -> None:
    assert said[3] == [7, None]


def test_chunked_prefill_settings_are_refused_on_cpus(said: list[Any]) -> None:
    assert said[4].startswith("--long-prefill-token-threshold: ")


def test_engines_bind_threads_to_separate_cores(said: list[Any]) -> None:
    assert said[5] == ["0-1", "here", "2|3", "nobind 2", "0|3", "here"]


HYBRID = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "torch_dtype": "bfloat16",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 4096,
    "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 1, "mamba_chunk_size": 16,
}  # fmt: skip
HYBRID_PROGRAM = """
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from engine.vllm.core import _compute_whole_prompts

arguments = {"model": sys.argv[1], "skip_tokenizer_init": True}
_compute_whole_prompts(arguments)
config = EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
print(config.scheduler_config.enable_chunked_prefill, config.cache_config.enable_prefix_caching)
"""


def test_models_with_state_layers_start_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    command = [str(PYTHON), "-c", HYBRID_PROGRAM, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False False"


def test_images_of_exclusive_requests_are_prepared_in_order() -> None:
    command = [str(PYTHON), "-m", "tests.vllm.alone"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    busy, alone, after = json.loads(done.stdout.splitlines()[-1])
    assert busy == [[1], []]
    assert alone == [[1, 2], ["2"]]
    assert after == [[1, 2, 3], ["4", "3"]]


def test_grammars_after_free_text_allow_the_same_tokens_as_built_in_ones() -> None:
    command = [str(PYTHON), "-m", "tests.vllm.followers"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    compared = json.loads(done.stdout.splitlines()[-1])
    assert min(compared[part] for part in ("OPENING", "FREE", "GRAMMAR")) > 100
