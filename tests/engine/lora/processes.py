"""Engines sharded over several processes, with adapters."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict, replace

from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team
from engine.shared.config import (
    LoraConfig,
)
from tests.engine.configs import config_of
from tests.engine.driver import GREEDY, Driver

LORA = LoraConfig(enable_lora=True, max_loras=2, max_lora_rank=8, lora_dir="/")
REPORTING = replace(GREEDY, prompt_logprobs=20)
"""Sampling of sequences whose logits are compared."""


class Processes:
    """An engine, optionally sharded over several processes."""

    def __init__(self, model: Path, head: Path | None = None, **parallel: Any) -> None:
        config = config_of(
            model,
            model={"max_model_len": 256},
            scheduler={"speculative_model": None if head is None else str(head)},
            parallel=parallel,
            lora=asdict(LORA),
        )
        self.executor: InProcessExecutor
        if config.parallel.processes > 1:
            self.executor = InProcessExecutor(config, team=Team(config, 0, 1))
        else:
            self.executor = InProcessExecutor(config)

    def load(self, adapter: Path) -> str:
        """Read an adapter and return its version."""
        store: Any = self.executor.adapters
        version: str = store.load(str(adapter), None).result()
        return version


class Reported(NamedTuple):
    """An engine's report for one position: log-probabilities of some tokens."""

    slot: int
    position: int
    ids: torch.Tensor
    logprobs: torch.Tensor


def reported(engine: Driver, slots: Iterable[int]) -> list[Reported]:
    """Compute prompts in one step; their sequences have `REPORTING`."""
    rows = {slot: len(engine.tokens[slot]) for slot in slots}
    logprobs = engine.step(rows).prompt_logprobs
    found = [
        Reported(slot, position, torch.tensor(each.top_ids), torch.tensor(each.top_logprobs))
        for row, slot in enumerate(rows)
        for position, each in enumerate(logprobs[row])
    ]
    assert len(found) >= sum(rows.values()) - len(rows)
    return found


def expected(engine: Driver, references: dict[int, Any], of: list[Reported]) -> list[torch.Tensor]:
    """Return the log-probabilities of the same tokens by references, models by slot."""
    made = {
        slot: reference.logits(engine.tokens[slot]).log_softmax(-1)
        for slot, reference in references.items()
    }
    return [made[each.slot][each.position][each.ids] for each in of]


def largest_error(engine: Driver, references: dict[int, Any]) -> float:
    """Compute prompts in one step; return how far log-probabilities are from the references'."""
    found = reported(engine, references)
    wanted = expected(engine, references, found)
    return largest_distance([each.logprobs for each in found], wanted)


def largest_distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the maximum absolute difference between two lists."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
