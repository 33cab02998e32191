"""What becomes of a configuration: log probabilities beside those of transformers."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.models.fallback.loading import load_fallback
from engine.models.families.registry import FAMILIES
from engine.models.formats.files import CheckpointError
from engine.models.spec import UnsupportedModel
from engine.runner.model_runner import ModelRunner
from engine.shared.config import ModelConfig
from tests.engine.driver import BLOCK_SIZE, NUM_BLOCKS, Driver, load_driver
from tests.engine.tiny_models import Checkpoint, randomize
from tests.parity.drawn import LENGTHS, Case

MAX_NATS = 2e-3
_CHUNKS = (3, 64, 1, 17, 300)
"""Tokens of a prompt in each step; the last is repeated."""


class Outcome(NamedTuple):
    """Of one configuration."""

    kind: Literal["agrees", "refused", "wrong", "not made"]
    detail: str
    nats: float = 0.0
    """The largest difference of a log probability."""


def compare(case: Case, directory: Path) -> Outcome:
    """Write the model, and compute prompts side by side in uneven chunks.

    Where two experts suit a token alike, rounding may choose the other one, and change what
    follows. So what differs is computed again with other prompts, which have no such token.
    """
    try:
        reference = _write(case, directory)
        reference.logits([1, 2, 3])
    except Exception as error:  # of many kinds: classes that cannot compute what they accept
        return Outcome("not made", f"{type(error).__name__}: {error}")
    try:
        nats = _difference(case, reference, factor=37)
        if not nats < MAX_NATS:
            nats = _difference(case, reference, factor=41)
    except (UnsupportedModel, CheckpointError) as error:
        return Outcome("refused", str(error).split("it cannot be served: ")[-1])
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    return Outcome("agrees" if nats < MAX_NATS else "wrong", f"{nats:.2g} nats", nats)


def _difference(case: Case, reference: Checkpoint, factor: int) -> float:
    """Return the largest difference of a log probability, in nats."""
    prompts = [[(factor * i + 11 * length) % 251 for i in range(length)] for length in LENGTHS]
    found = _computed(_load(case, reference.directory), prompts)
    differences = [
        (own.float().log_softmax(1)[:, : each.shape[1]] - each.log_softmax(1)).abs().max()
        for own, each in zip(found, map(reference.logits, prompts), strict=True)
    ]
    return float(torch.stack(differences).max())


def _write(case: Case, directory: Path) -> Checkpoint:
    config: Any = CONFIG_MAPPING[case.config["model_type"]].from_dict(deepcopy(case.config))
    model_class = getattr(transformers, case.config["architectures"][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reference = model_class._from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()
    randomize(reference, 1)
    reference.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(case.config), encoding="utf-8")
    if case.config["architectures"][0] not in FAMILIES:
        # Some classes change tensors as they are loaded.
        reference = model_class.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        ).eval()
    return Checkpoint(directory, reference)


def _load(case: Case, directory: Path) -> Driver:
    longest = max(LENGTHS) + 1
    if case.config["architectures"][0] in FAMILIES:
        return load_driver(directory, dtype="float32")
    settings = ModelConfig(model=str(directory), dtype="float32")
    runner = ModelRunner(
        load_fallback(directory, settings, torch.device("cpu")).model,
        max_num_seqs=len(LENGTHS),
        max_model_len=longest,
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    return Driver(runner)


def _computed(driver: Driver, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of every token of each prompt."""
    for slot, prompt in enumerate(prompts):
        driver.start(slot, prompt)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    step = 0
    while any(driver.computed[slot] < len(prompt) for slot, prompt in enumerate(prompts)):
        rows = {}
        for slot, prompt in enumerate(prompts):
            chunk = _CHUNKS[min(step + slot, len(_CHUNKS) - 1)]
            count = min(chunk, len(prompt) - driver.computed[slot])
            if count:
                rows[slot] = count
        logits = torch.split(driver.logits(rows), list(rows.values()))
        for slot, part in zip(rows, logits, strict=True):
            parts[slot].append(part)
        step += 1
    return [torch.cat(each) for each in parts]
