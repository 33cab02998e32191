"""A driver that plays scheduler for a runner, and tiny checkpoints written by transformers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import ModelConfig
from engine.messages import SamplingParams
from engine.models.hf_config import read_spec
from engine.models.loader import DecoderLoader, compute_dtype, model_length, open_checkpoint
from engine.runner.model_runner import ModelRunner
from engine.scheduler.batch import BatchPlan, BatchResult, SlotBlocks, SlotStart

BLOCK_SIZE = 8
NUM_BLOCKS = 400
MAX_MODEL_LEN = 256

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 300}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN_ROPE, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-some-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-many": ("Qwen3Moe", {**_MOE, "num_experts": 16, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {**_MOE, "mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}
GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


class Checkpoint:
    """A saved random model and its reference implementation."""

    def __init__(self, directory: Path, reference: Any) -> None:
        self.directory = directory
        self.reference = reference

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return [tokens, vocab] from one pass over the whole sequence."""
        return self.reference(torch.tensor([token_ids])).logits[0]

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """Return the continuation that the reference generates."""
        cache, fed, tokens = None, torch.tensor([token_ids]), []
        for _ in range(count):
            out = self.reference(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            fed = torch.tensor([tokens[-1:]])
        return tokens


class Driver:
    """Hands out blocks in random order, builds plans, and keeps what each slot should hold."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self._free = list(range(NUM_BLOCKS))
        random.Random(7).shuffle(self._free)
        self._starting: list[SlotStart] = []
        self._new_blocks: list[SlotBlocks] = []
        self._step = 0

    def start(
        self,
        slot: int,
        token_ids: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        cached_blocks: list[int] | None = None,
    ) -> None:
        """Let a sequence take a slot, with its first tokens in blocks that are filled already."""
        prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self._starting.append(SlotStart(slot, list(token_ids), prompt, sampling))
        self.tokens[slot] = list(token_ids)
        self.blocks[slot] = list(cached_blocks or [])
        self.computed[slot] = len(self.blocks[slot]) * BLOCK_SIZE
        if self.blocks[slot]:
            self._new_blocks.append(SlotBlocks(slot, 0, list(self.blocks[slot])))

    def plan(self, rows: dict[int, int]) -> BatchPlan:
        """Return a plan that computes so many tokens of each slot, in the order given."""
        starts = [self.computed[slot] for slot in rows]
        for (slot, count), start in zip(rows.items(), starts, strict=True):
            first = len(self.blocks[slot])
            needed = -(-(start + count) // BLOCK_SIZE) - first
            new = [self._free.pop() for _ in range(needed)]
            self.blocks[slot] += new
            if new:
                self._new_blocks.append(SlotBlocks(slot, first, new))
            self.computed[slot] = start + count
        plan = BatchPlan(
            step=self._step,
            starting=self._starting,
            blocks=self._new_blocks,
            slots=list(rows),
            starts=starts,
            counts=list(rows.values()),
            samples=[self.computed[slot] == len(self.tokens[slot]) for slot in rows],
        )
        self._step += 1
        self._starting, self._new_blocks = [], []
        return plan

    def step(self, rows: dict[int, int]) -> BatchResult:
        """Run one plan and append its tokens."""
        plan = self.plan(rows)
        result = self.runner.run(plan)
        sampling = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        for slot, token in zip(sampling, result.token_ids, strict=True):
            self.tokens[slot].append(token)
        return result

    def prefill(self, *slots: int) -> BatchResult:
        """Compute all known tokens of these slots in one step."""
        return self.step({slot: len(self.tokens[slot]) - self.computed[slot] for slot in slots})

    def decode(self, count: int, *slots: int) -> None:
        """Run steps of one token per slot."""
        for _ in range(count):
            self.step(dict.fromkeys(slots, 1))

    def logits(self, rows: dict[int, int]) -> torch.Tensor:
        """Return the logits of every token of a step."""
        hidden = self.runner.hidden_states(self.plan(rows))
        with torch.inference_mode():
            return self.runner.model.logits(hidden)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from more, and threads that wait for a busy core lose much."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Return a function that saves a named tiny model once; keywords go to `save_pretrained`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    saved: dict[str, Checkpoint] = {}

    def save(name: str, **options: Any) -> Checkpoint:
        key = name + str(options)
        if key not in saved:
            family, settings = _MODELS[name]
            config = getattr(transformers, f"{family}Config")(**{**_SIZES, **settings})
            reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            _randomize(reference, seed=len(saved))
            directory = tmp_path_factory.mktemp(name)
            reference.save_pretrained(directory, **options)
            saved[key] = Checkpoint(directory, reference)
        return saved[key]

    return save


@pytest.fixture(scope="session")
def driver() -> Callable[..., Driver]:
    """Return a function that loads a model directory into a fresh runner."""

    def load(directory: Path, **settings: Any) -> Driver:
        config = ModelConfig(model=str(directory), **settings)
        spec = read_spec(directory)
        weights = open_checkpoint(directory, spec, config)
        loader = DecoderLoader(
            spec,
            weights,
            dtype=compute_dtype(spec, config, weights),
            device=torch.device("cpu"),
            max_model_len=model_length(spec, config),
        )
        with torch.inference_mode():
            model = loader.load()
        runner = ModelRunner(
            model,
            max_num_seqs=32,
            max_model_len=model_length(spec, config),
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )
        return Driver(runner)

    return load


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """Return a function that makes a prompt of so many tokens, the same for the same length."""

    def make(length: int) -> list[int]:
        source = random.Random(length)
        return [source.randrange(256) for _ in range(length)]

    return make
