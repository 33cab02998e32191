"""Engines with adapters: sharded, preempted, overlapped, with grammars."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from engine.core.engine_core import EngineCore
from engine.core.events import PrerequisitesSettled
from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team
from engine.lora.adapter_config import BadAdapter
from engine.shared.config import (
    BUNDLED_MODEL,
    LoraConfig,
)
from engine.shared.messages import AdapterEntry, AdapterTable, AddRequest, RegexGrammar
from tests.engine.configs import config_of
from tests.engine.draft_heads import save_eagle3
from tests.engine.driver import Driver
from tests.engine.executor.test_images import show, text
from tests.engine.kv.played_engine import PlayedEngine
from tests.engine.lora.adapters import TEXT_OF_SEEING_MODELS
from tests.engine.lora.processes import LORA, REPORTING, Processes, largest_error
from tests.engine.serving import request
from tests.support.adapter_files import write_adapter


@pytest.fixture
def processes() -> Any:
    """Return a function that starts an engine of several processes."""
    started: list[Processes] = []

    def start(model: Path, head: Path | None = None, **parallel: Any) -> Processes:
        started.append(Processes(model, head, **parallel))
        return started[-1]

    yield start
    for each in started:
        each.executor.shutdown()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("mixtral", {"tensor_parallel_size": 4}),
        ("qwen3-moe-deep", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("gemma3", {"pipeline_parallel_size": 3}),  # stages without layers of some groups
    ],
)
def test_a_model_in_several_processes_computes_each_row_with_its_adapter(
    name: str, layout: dict[str, int], checkpoint: Any, trained: Any, prompt: Any, processes: Any
) -> None:
    model = checkpoint(name)
    targets = ["q_proj", "v_proj", "o_proj"]
    if name == "llama":
        targets += ["gate_proj", "down_proj", "embed_tokens", "lm_head"]
    experts = ["experts.gate_up_proj", "experts.down_proj"] if "moe" in name else None
    if name == "mixtral":
        experts = ["mlp.gate.weight", "experts.gate_up_proj"]
    one = trained(name, 7, target_modules=targets, r=3, target_parameters=experts)
    two = trained(name, 8, target_modules=["k_proj", "o_proj"], r=8)
    team = processes(model.directory, **layout)
    engine = Driver(team.executor)
    engine.adapters = {0: team.load(two.directory), 1: team.load(one.directory)}
    for row, adapter in enumerate((1, -1, 0)):
        engine.start(row, prompt(30 - row), REPORTING, adapter=adapter)
    assert largest_error(engine, {0: one.merged, 1: model, 2: two.merged}) < 1e-4
    engine.decode(20, 1, 0, 2)
    for row, reference in enumerate((one.merged, model, two.merged)):
        generated = engine.tokens[row][30 - row :]
        assert generated == reference.greedy(prompt(30 - row), 21, generated)


@pytest.mark.parametrize("shards", [1, 2])
def test_draft_heads_use_no_adapters(
    shards: int, checkpoint: Any, trained: Any, prompt: Any, processes: Any, tmp_path: Path
) -> None:
    model = checkpoint("llama-deep")
    adapter = trained("llama-deep", 7, target_modules=["embed_tokens", "lm_head", "q_proj"], r=3)
    save_eagle3(model, tmp_path, layer_ids=[1, 2, 3])
    team = processes(model.directory, tmp_path, tensor_parallel_size=shards)
    engine = Driver(team.executor)
    engine.adapters = {0: team.load(adapter.directory)}
    engine.start(0, prompt(30), adapter=0)
    engine.start(1, prompt(20))
    engine.prefill(0, 1)
    engine.decode(15, 1, 0)
    assert engine.tokens[0][30:] == adapter.merged.greedy(prompt(30), 16)
    assert engine.tokens[1][20:] == model.greedy(prompt(20), 16)


@pytest.mark.parametrize("shards", [1, 2])
def test_engines_that_share_experts_support_attention_adapters(
    checkpoint: Any, trained: Any, prompt: Any, shards: int
) -> None:
    adapter = trained("mixtral", 7, target_modules=["q_proj", "v_proj", "o_proj", "gate"], r=3)
    config = config_of(
        checkpoint("mixtral").directory,
        parallel={
            "enable_expert_parallel": True,
            "tensor_parallel_size": shards,
            "enable_eplb": shards > 1,
            "num_redundant_experts": 2 if shards > 1 else 0,
            "eplb_step_interval": 3,
        },
        lora=asdict(LORA),
    )
    executor: InProcessExecutor
    if shards == 1:
        executor = InProcessExecutor(config)
    else:
        executor = InProcessExecutor(config, team=Team(config, 0, 1))
    store: Any = executor.adapters
    version = store.load(str(adapter.directory), None).result()
    experts = trained("mixtral", 8, target_parameters=["experts.down_proj"])
    with pytest.raises(BadAdapter, match="remove --enable-expert-parallel"):
        store.load(str(experts.directory), None).result()

    engine = Driver(executor)
    engine.adapters = {0: version}
    engine.start(0, prompt(30), adapter=0)
    engine.start(1, prompt(20))
    engine.prefill(0, 1)
    engine.decode(15, 1, 0)
    assert engine.tokens[0][30:] == adapter.merged.greedy(prompt(30), 16)
    assert engine.tokens[1][20:] == checkpoint("mixtral").greedy(prompt(20), 16)
    if shards > 1:
        assert executor.expert_balance is not None
        assert executor.expert_balance.moved_layers > 0
    executor.shutdown()


class Served:
    """An engine with the adapters of a directory."""

    def __init__(self, root: Path, **settings: Any) -> None:
        adapters = {"lora_dir": str(root), "max_loras": settings.pop("max_loras", 2)}
        self.config = config_of(
            BUNDLED_MODEL,
            model={"max_model_len": 256},
            cache={"num_kv_blocks": settings.pop("num_blocks", 200)},
            executor={"batch_invariant": settings.pop("batch_invariant", False)},
            lora=asdict(LORA) | adapters,
            parallel={"pipeline_parallel_size": settings.pop("stages", 1)},
            scheduler={"max_num_batched_tokens": 48} | settings,
        )
        self.executor: InProcessExecutor
        if self.config.parallel.processes > 1:
            self.executor = InProcessExecutor(self.config, team=Team(self.config, 0, 1))
        else:
            self.executor = InProcessExecutor(self.config)
        self.core = EngineCore(self.config, self.executor, rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)
        names = sorted(path.name for path in root.iterdir())
        entries = [AdapterEntry(serial, name, name) for serial, name in enumerate(names, 1)]
        self.core.adapters.take(AdapterTable(1, entries))
        assert self.core.adapters.wait() == []
        self.versions = ["", *self.core.adapters.versions().values()]

    def answer(self, requests: list[AddRequest]) -> dict[int, list[int]]:
        """Run requests to completion."""
        tokens: dict[int, list[int]] = {each.id: [] for each in requests}
        for each in requests:
            self.core.handle(each)
        while self.core.has_requests:
            self.core.handle(PrerequisitesSettled())
            for output in self.core.step().outputs.get(0, []):
                assert output.finish_reason != "error", output.error
                tokens[output.id] += output.token_ids
        return tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("art", "law", "sql")):
        write_adapter(directory / name, seed=seed, rank=4, size=0.3)
    return directory


@pytest.fixture
def serve(root: Path) -> Any:
    started: list[Served] = []

    def start(**settings: Any) -> Served:
        started.append(Served(root, **settings))
        return started[-1]

    yield start
    for each in started:
        each.executor.shutdown()


def mixed(versions: list[str], prompt: Callable[[int], list[int]]) -> list[AddRequest]:
    """Return requests of all adapters and of none, with prompts longer than a step."""
    requests = [
        request(id, prompt(20 + 10 * (id % 5)), max_tokens=16, temperature=0.0)
        for id in range(1, 13)
    ]
    return [replace(each, adapter=versions[each.id % 4]) for each in requests]


@pytest.fixture(scope="module")
def alone(root: Path) -> Any:
    """Requests, and the answer of each when run alone."""

    def prompt(length: int) -> list[int]:
        source = random.Random(length)
        return [source.randrange(256) for _ in range(length)]

    engine = Served(root, max_loras=3)
    requests = mixed(engine.versions, prompt)
    expected = {each.id: engine.answer([each])[each.id] for each in requests}
    assert expected[1] != engine.answer([replace(requests[0], adapter="")])[1]
    engine.executor.shutdown()
    return requests, expected


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 34, "speculative_ngram": 4},
        {"batch_invariant": True},
        {"stages": 2, "max_loras": 1, "async_scheduling": True, "num_blocks": 40},
        {"speculative_model": str(BUNDLED_MODEL), "speculative_row_price": 0},
    ],
    ids=str,
)
def test_adapter_is_kept_on_all_paths_through_an_engine(
    settings: dict[str, Any], serve: Any, alone: Any
) -> None:
    requests, expected = alone
    other = serve(**settings)
    assert other.answer(requests) == expected
    counters = other.core.stats().counters
    if settings.get("num_blocks") == 34:
        assert counters.preemptions
    assert bool(counters.spec_accepted_tokens) >= ("speculative_model" in settings)


def test_grammars_work_with_adapters(serve: Any, prompt: Any) -> None:
    engine = serve()
    grammar = RegexGrammar("(ab|cd){3}")
    message = request(1, prompt(20), max_tokens=30, grammar=grammar, ignore_eos=False)
    found = engine.answer([replace(message, adapter=engine.versions[1]), replace(message, id=2)])
    assert all(1 < len(tokens) < 30 for tokens in found.values())


@pytest.mark.parametrize("name", ["smolvlm", "qwen2.5-vl", "gemma3-vision"])
def test_image_prompts_use_adapters_in_several_processes(
    name: str, checkpoint: Any, trained: Any
) -> None:
    model, adapter = checkpoint(name), trained(name, target_modules=TEXT_OF_SEEING_MODELS)
    lora = LoraConfig(enable_lora=True, lora_dir=str(adapter.directory.parent))
    message = show(1, text(5), 1, text(9), name=name)
    answers = []
    for shards in (1, 2):
        engine = PlayedEngine(model.directory, None, incarnation=1, shards=shards, lora=lora)
        [version] = engine.load_adapters([adapter.directory.name])
        answers.append([engine.answer(replace(message, adapter=each)) for each in ("", version)])
        engine.close()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
