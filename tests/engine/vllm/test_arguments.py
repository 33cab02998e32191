"""Settings become vLLM arguments or are rejected by name; none is ignored."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.shared.config import (
    EngineConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.vllm.arguments import engine_arguments

KNOWN = frozenset({"trust_remote_code", "max_model_len", "data_parallel_size"})
VLLM = ExecutorConfig(engine_backend="vllm")


def given(text: str) -> EngineConfig:
    return EngineConfig(executor=replace(VLLM, engine_args=text))


def test_common_settings_are_passed_and_defaults_left_to_vllm() -> None:
    config = EngineConfig(
        model=ModelConfig(
            model="some/model",
            max_model_len=512,
            dtype="float32",
            limit_mm_per_prompt='{"image": 4}',
        ),
        scheduler=SchedulerConfig(max_num_seqs=7),
        parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=4),
        executor=replace(VLLM, enforce_eager=True),
    )
    assert engine_arguments(config, KNOWN) == {
        "model": "some/model", "max_model_len": 512, "dtype": "float32", "max_num_seqs": 7,
        "tensor_parallel_size": 2, "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 4, "video": 0, "audio": 0},
    }  # fmt: skip


def test_adapters_stay_in_memory_and_have_a_rank_that_vllm_knows() -> None:
    lora = LoraConfig(enable_lora=True, max_loras=2, max_cpu_loras=9, max_lora_rank=17)
    arguments = engine_arguments(EngineConfig(lora=lora), KNOWN)
    assert {name: value for name, value in arguments.items() if "lora" in name} == {
        "enable_lora": True, "max_loras": 2, "max_cpu_loras": 9, "max_lora_rank": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (EngineConfig(model=ModelConfig(quantization="int8")), "--quantization"),
        (EngineConfig(scheduler=SchedulerConfig(speculative_ngram=3)), "--speculative-ngram"),
        (EngineConfig(executor=replace(VLLM, executor="simulated")), "--executor"),
        (EngineConfig(executor=replace(VLLM, batch_invariant=True)), "--batch-invariant"),
        (
            EngineConfig(
                parallel=ParallelConfig(enable_expert_parallel=True, data_parallel_size=2)
            ),
            "--enable-expert-parallel",
        ),
    ],
)
def test_settings_that_a_vllm_engine_would_ignore_are_refused(
    config: EngineConfig, flag: str
) -> None:
    with pytest.raises(ValueError, match=f"{flag} .*needs --engine-backend swell"):
        engine_arguments(config, KNOWN)


@pytest.mark.parametrize("text", ["trust-remote-code: true", '{"trust_remote_code": true}'])
def test_engine_args_accept_yaml_json_or_a_file(text: str, tmp_path: Path) -> None:
    assert engine_arguments(given(text), KNOWN)["trust_remote_code"] is True
    file = tmp_path / "arguments.yaml"
    file.write_text(text)
    assert engine_arguments(given(str(file)), KNOWN)["trust_remote_code"] is True


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_model_len: 5", "use --max-model-len"),
        ("max_lora_rank: 8", "use --max-lora-rank"),
        ("pooler_config: {}", "use --pooler-config"),
        ("data_parallel_size: 2", "use --data-parallel-size"),
        ("no_such: 1", "no argument 'no_such'"),
        ("[1]", "has to be an object"),
        ("{", "neither YAML nor JSON"),
    ],
)
def test_invalid_engine_args_are_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engine_arguments(given(text), KNOWN)
