"""Simulates a scheduler for anything that runs batch plans."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine.batch.batch import BatchPlan, BatchResult, SlotBlocks, SlotStart
from engine.kernels.registry import fused_kernels
from engine.models.attention.kv_format import KvCacheDtype
from engine.models.cache_groups import divide, one_group
from engine.models.hf_config import read_spec
from engine.models.loading.decoder import AdapterCapacity, DecoderLoader
from engine.models.settings import compute_types, model_length, open_checkpoint
from engine.models.vision.loading import load_vision
from engine.runner.model_runner import ModelRunner
from engine.shared.config import ModelConfig
from engine.shared.messages import EncoderInput, SamplingParams
from engine.shared.model_files import model_directory
from tests.engine.images import slot_image

BLOCK_SIZE = 8
NUM_BLOCKS = 400
_CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


class Driver:
    """Allocates blocks in random order, builds plans, and tracks the tokens of each slot.

    Args:
        runner: runs plans, as a model runner does, or is an executor.
    """

    def __init__(self, runner: Any, num_blocks: int = NUM_BLOCKS) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self._num_groups = _num_groups(runner)
        self._free = list(range(num_blocks // self._num_groups))
        random.Random(7).shuffle(self._free)
        self._starting: list[SlotStart] = []
        self._new_blocks: list[SlotBlocks] = []
        self._step = 0
        self._adapter_of: dict[int, int] = {}
        self.adapters: dict[int, str] = {}
        """Adapters that the next plan loads into adapter slots."""
        self.encoded: list[EncoderInput] = []
        """Encoder inputs of the next plan."""

    def start(
        self,
        slot: int,
        token_ids: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        adapter: int = -1,
        cached_blocks: list[int] | None = None,
        images: Sequence[EncoderInput] = (),
    ) -> None:
        """Start a sequence in a slot, with its first tokens in blocks that are already filled."""
        prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        shown = [slot_image(each) for each in images]
        self._starting.append(
            SlotStart(slot, list(token_ids), prompt, sampling, adapter=adapter, images=shown)
        )
        self.encoded += images
        self._adapter_of[slot] = adapter
        self.tokens[slot] = list(token_ids)
        self.blocks[slot] = list(cached_blocks or [])
        self.computed[slot] = len(self.blocks[slot]) * BLOCK_SIZE
        if self.blocks[slot]:
            self._append(slot, 0, self.blocks[slot])

    def plan(self, rows: dict[int, int]) -> BatchPlan:
        """Return a plan that computes this many tokens of each slot, in the given order."""
        starts = [self.computed[slot] for slot in rows]
        for (slot, count), start in zip(rows.items(), starts, strict=True):
            first = len(self.blocks[slot])
            needed = -(-(start + count) // BLOCK_SIZE) - first
            new = [self._free.pop() for _ in range(needed)]
            self.blocks[slot] += new
            if new:
                self._append(slot, first, new)
            self.computed[slot] = start + count
        plan = BatchPlan(
            step=self._step,
            starting=self._starting,
            blocks=self._new_blocks,
            slots=list(rows),
            starts=starts,
            counts=list(rows.values()),
            samples=[self.computed[slot] == len(self.tokens[slot]) for slot in rows],
            adapters=self.adapters,
            encoded=self.encoded,
        )
        self.adapters, self.encoded = {}, []
        self._step += 1
        self._starting, self._new_blocks = [], []
        return plan

    def _append(self, slot: int, first: int, blocks: list[int]) -> None:
        """Assign blocks to a slot: each number stands for one block per layer group."""
        count = self._num_groups
        self._new_blocks += [
            SlotBlocks(slot, first, [count * block + group for block in blocks], group)
            for group in range(count)
        ]

    def step(self, rows: dict[int, int]) -> BatchResult:
        """Run one plan and append its tokens."""
        plan = self.plan(rows)
        runner = self.runner
        result: BatchResult = (
            runner.run(plan) if hasattr(runner, "run") else runner.submit(plan).result()
        )
        self.take(plan, result)
        return result

    def take(self, plan: BatchPlan, result: BatchResult) -> None:
        """Append the tokens of a plan that has run."""
        sampling = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        for slot, token in zip(sampling, result.token_ids, strict=True):
            self.tokens[slot].append(token)

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
        model, slots = self.runner.model, self._adapter_of
        adapters = np.repeat([slots[slot] for slot in rows], list(rows.values()))
        bank = model.adapters
        with torch.inference_mode():
            logits: torch.Tensor = model.logits(
                hidden, None if bank is None else bank.rows(adapters)
            )
        return logits


def load_driver(
    directory: Path,
    *,
    batch_invariant: bool = False,
    adapters: AdapterCapacity | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    fused: bool = False,
    device: torch.device = _CPU,
    **settings: Any,
) -> Driver:
    """Load a model directory, or a GGUF file, into a fresh runner; `fused`: with such kernels."""
    config = ModelConfig(model=str(directory), **settings)
    files = model_directory(config, weights=True)
    spec = read_spec(files)
    groups = one_group(spec.windows)
    if device.type == "cpu":
        groups = divide(spec.windows, model_length(spec, config))
    spec = msgspec.structs.replace(spec, cache_groups=groups)
    weights = open_checkpoint(files, spec, config)
    types = compute_types(spec, config, weights, device=device)
    loader = DecoderLoader(
        spec,
        weights,
        types=types._replace(kv_cache_dtype=kv_cache_dtype),
        device=device,
        max_model_len=model_length(spec, config),
        quantization=config.quantization,
        batch_invariant=batch_invariant,
        adapters=adapters,
        kernels=fused_kernels(types.activations, device) if fused else None,
    )
    with torch.inference_mode():
        model = loader.load()
    vision = None
    if spec.vision is not None:
        vision = load_vision(files, spec, config, types.activations, device)
    runner = ModelRunner(
        model,
        max_num_seqs=32,
        max_model_len=model_length(spec, config),
        num_kv_blocks=NUM_BLOCKS * len(groups.windows),
        block_size=BLOCK_SIZE,
        vision=vision,
    )
    return Driver(runner, NUM_BLOCKS * len(groups.windows))


def _num_groups(runner: Any) -> int:
    """Return the number of layer groups with separate blocks."""
    if isinstance(runner, ModelRunner):
        return len(runner.model.spec.cache_groups.windows)
    return len(getattr(runner, "executor", runner).info.cache_windows)
