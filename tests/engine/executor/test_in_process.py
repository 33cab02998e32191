"""The in-process executor: from settings to a model that runs plans."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import torch

from engine.batch.batch import BatchPlan, SlotBlocks, SlotStart
from engine.batch.executor import CannotDo
from engine.batch.weight_transfer import SentTensors, WeightTransfer
from engine.executor.in_process import InProcessExecutor
from engine.models.families.registry import family_of
from engine.models.formats.files import CheckpointError
from engine.models.hf_config import read_spec
from engine.models.spec import UnsupportedModel
from engine.models.weights import stored_tensors
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.shared.group_config import group_config
from engine.shared.messages import SamplingParams
from engine.shared.model_files import ModelNotFound
from tests.engine.configs import config_of
from tests.engine.fixtures import SaveModel

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": [5, 6],
    "dtype": "bfloat16",
}


MakeConfig: TypeAlias = Callable[..., EngineConfig]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def settings(model: Path) -> MakeConfig:
    def settings(cache: CacheConfig | None = None, **changes: Any) -> EngineConfig:
        options = {"model": str(model), "load_format": "dummy", "device": "cpu", **changes}
        return EngineConfig(
            model=ModelConfig(**options),
            cache=cache or CacheConfig(),
            scheduler=SchedulerConfig(max_num_seqs=4),
            executor=ExecutorConfig(threads=1),
        )

    return settings


def plan(tokens: list[int], start: int = 0, count: int | None = None) -> BatchPlan:
    starting = [SlotStart(1, tokens, len(tokens), SamplingParams(max_tokens=9, seed=4))]
    blocks = [SlotBlocks(1, 0, [3, 1])]
    return BatchPlan(0, starting, blocks, [1], [start], [count or len(tokens)], [True])


def test_info_describes_the_loaded_model(settings: MakeConfig) -> None:
    messages: list[str] = []
    executor = InProcessExecutor(settings(), progress=messages.append)
    info = executor.info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (128, 99, (5, 6))
    assert info.num_kv_blocks == 4 * 128 // 16
    assert len(info.model_fingerprint) == 32
    words = list(dict.fromkeys(phrase.split()[0] for phrase in messages))
    assert words in (["loading", "allocating"], ["preparing", "loading", "allocating"])
    assert torch.get_num_threads() == 1


def test_equal_settings_give_equal_tokens_and_fingerprints(settings: MakeConfig) -> None:
    one, same = InProcessExecutor(settings()), InProcessExecutor(settings())
    other = InProcessExecutor(settings(seed=8))
    tokens = [one.submit(plan([7, 8, 9])).result(), same.submit(plan([7, 8, 9])).result()]
    assert tokens[0] == tokens[1]
    assert one.info.model_fingerprint == same.info.model_fingerprint
    assert one.info.model_fingerprint != other.info.model_fingerprint


def test_shorter_length_is_honoured_and_longer_refused(settings: MakeConfig) -> None:
    assert InProcessExecutor(settings(max_model_len=64)).info.max_model_len == 64
    with pytest.raises(UnsupportedModel, match=r"129 is more than the 128"):
        InProcessExecutor(settings(max_model_len=129))


def test_impossible_start_reports_reason(settings: MakeConfig, model: Path) -> None:
    with pytest.raises(ModelNotFound):
        InProcessExecutor(settings(model=str(model / "absent")))
    with pytest.raises(CheckpointError, match="lacks"):
        InProcessExecutor(settings(load_format="auto"))
    with pytest.raises(ValueError, match="KV blocks"):
        InProcessExecutor(settings(cache=CacheConfig(num_kv_blocks=2)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_device_is_refused(settings: MakeConfig) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        InProcessExecutor(settings(device="cuda"))


@pytest.fixture
def executor(request: pytest.FixtureRequest, settings: MakeConfig) -> Iterator[InProcessExecutor]:
    """An executor with a thread for its steps, unless parametrized not to have one."""
    is_overlapped = getattr(request, "param", True)
    executor = InProcessExecutor(
        msgspec.structs.replace(
            settings(), scheduler=SchedulerConfig(max_num_seqs=4, async_scheduling=is_overlapped)
        )
    )
    yield executor
    executor.shutdown()


WITH_AND_WITHOUT_THREAD = pytest.mark.parametrize(
    "executor", [False, True], ids=["apart", "overlapped"], indirect=True
)


@WITH_AND_WITHOUT_THREAD
def test_a_failure_in_a_step_is_raised_by_its_result(executor: InProcessExecutor) -> None:
    failing, fine = executor.submit(plan([98, 99])), executor.submit(plan([7, 8]))
    with pytest.raises(ValueError, match="vocabulary"):
        failing.result()
    assert len(fine.result().token_ids) == 1


@WITH_AND_WITHOUT_THREAD
def test_shutdown_is_final_and_idempotent(executor: InProcessExecutor) -> None:
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(plan([1]))


# -- sleep and profiles ---------------------------------------------------------------------------


@WITH_AND_WITHOUT_THREAD
def test_a_model_is_the_same_after_a_sleep(executor: InProcessExecutor) -> None:
    before = executor.submit(plan([7, 8, 9])).result()
    for level in (1, 2):
        executor.sleep(level)
        executor.sleep(level)
        with pytest.raises(RuntimeError, match="sleeps"):
            executor.submit(plan([7, 8, 9]))
        executor.wake_up()
        executor.wake_up()
        assert executor.submit(plan([7, 8, 9])).result() == before


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("gpt-oss-mxfp4", None), ("glm4-moe-normed", None), ("deepseek3", None), ("llama", "int8")],
)
def test_every_kind_of_weights_is_the_same_after_a_sleep(
    name: str, quantization: Any, checkpoint: SaveModel
) -> None:
    kind = {"quantization": quantization}
    executor = InProcessExecutor(config_of(checkpoint(name).directory, model=kind))
    try:
        before = executor.submit(plan([7, 8, 9])).result()
        for level in (1, 2):
            executor.sleep(level)
            executor.wake_up()
            assert executor.submit(plan([7, 8, 9])).result() == before
    finally:
        executor.shutdown()


def test_engines_of_one_group_share_their_quantization(settings: MakeConfig) -> None:
    plain, quantized = group_config(settings()), group_config(settings(quantization="int8"))
    assert {name for name in plain if plain[name] != quantized[name]} == {"quantization"}


def test_engines_of_one_group_keep_keys_and_values_alike(settings: MakeConfig) -> None:
    plain, fp8, e4m3 = (
        group_config(settings(CacheConfig(kv_cache_dtype=kept)))
        for kept in ("auto", "fp8", "fp8_e4m3")
    )
    assert {name for name in plain if plain[name] != fp8[name]} == {"kv_cache_dtype"}
    assert fp8 == e4m3


def test_changed_weights_have_another_fingerprint(executor: InProcessExecutor, model: Path) -> None:
    changed = CONFIG | {"num_hidden_layers": 1}
    executor.sleep(1)
    (model / "config.json").write_text(json.dumps(changed))
    executor.wake_up()  # the weights stayed in memory
    executor.sleep(2)
    with pytest.raises(CannotDo, match="have changed"):
        executor.wake_up()
    (model / "config.json").write_text(json.dumps(CONFIG))
    executor.wake_up()
    assert len(executor.submit(plan([7, 8])).result().token_ids) == 1


def test_weights_that_cannot_be_loaded_leave_everything_as_it_was(
    executor: InProcessExecutor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = executor.submit(plan([7, 8, 9])).result()
    fingerprint = executor.info.model_fingerprint
    smaller, empty = tmp_path_factory.mktemp("smaller"), tmp_path_factory.mktemp("empty")
    (smaller / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    for directory, reason in ((smaller, "another shape"), (empty, "cannot be loaded")):
        with pytest.raises(CannotDo, match=reason):
            executor.load_weights(str(directory), None)
        assert executor.submit(plan([7, 8, 9])).result() == before
        assert executor.info.model_fingerprint == fingerprint
    executor.sleep(2)
    with pytest.raises(CannotDo, match="wake it up"):
        executor.load_weights(str(smaller), None)
    executor.wake_up()
    assert executor.submit(plan([7, 8, 9])).result() == before


def test_trainer_weights_are_used_until_reverted(
    executor: InProcessExecutor, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fingerprint = executor.submit(plan([7, 8, 9])).result(), executor.info
    layout = stored_tensors(family_of("Qwen3MoeForCausalLM").weights(read_spec(model)))
    draw = torch.Generator().manual_seed(3)
    sent = {name: torch.randn(shape, generator=draw) for name, shape in layout.items()}
    parts = iter([dict(list(sent.items())[1:]), sent, sent])
    monkeypatch.setattr(WeightTransfer, "take", lambda _: SentTensors(next(parts)))
    with pytest.raises(CannotDo, match=r"missing model\.embed_tokens"):
        executor.take_weights()
    assert executor.submit(plan([7, 8, 9])).result() == before
    assert executor.info == fingerprint

    executor.take_weights()
    other = executor.submit(plan([7, 8, 9])).result()
    assert other != before
    assert executor.info.model_fingerprint != fingerprint.model_fingerprint
    executor.settle_weights(revert=True)
    assert executor.submit(plan([7, 8, 9])).result() == before
    assert executor.info == fingerprint

    executor.take_weights()
    executor.settle_weights(revert=False)
    assert executor.submit(plan([7, 8, 9])).result() == other
    with pytest.raises(CannotDo, match="no longer available"):
        executor.settle_weights(revert=True)


def test_unsupported_trainer_updates_are_refused_by_name(
    settings: MakeConfig, executor: InProcessExecutor
) -> None:
    shared = ParallelConfig(enable_expert_parallel=True, data_parallel_size=1)
    with pytest.raises(CannotDo, match="--enable-expert-parallel"):
        InProcessExecutor(msgspec.structs.replace(settings(), parallel=shared)).weight_transfer()
    assert executor.weight_transfer().phase == "none"
    executor.sleep(1)
    with pytest.raises(CannotDo, match="not joined a trainer"):
        executor.take_weights()


def test_weights_can_wake_up_before_the_cache(executor: InProcessExecutor) -> None:
    before = executor.submit(plan([7, 8, 9])).result()
    executor.sleep(2)
    executor.wake_up(kv_cache=False)
    with pytest.raises(RuntimeError, match="sleeps"):
        executor.submit(plan([7, 8, 9]))
    executor.wake_up()
    assert executor.submit(plan([7, 8, 9])).result() == before


@WITH_AND_WITHOUT_THREAD
def test_a_profile_shows_the_operations_of_the_steps_in_between(
    executor: InProcessExecutor, tmp_path: Path
) -> None:
    path = tmp_path / "traces" / "one.json.gz"
    with pytest.raises(CannotDo, match="no profile"):
        executor.stop_profile(path)
    executor.start_profile()
    with pytest.raises(CannotDo, match="already"):
        executor.start_profile()
    executor.submit(plan([7, 8, 9])).result()
    executor.stop_profile(path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event["name"].startswith("aten::embedding") for event in events)
