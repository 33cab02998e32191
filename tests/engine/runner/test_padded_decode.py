"""Decode steps padded to the sizes that a device has recorded."""

import numpy as np
import pytest
import torch

from engine.models.attention.cuda import KernelAttention
from engine.models.attention.interface import Heads
from engine.models.step import StepTokens
from engine.runner.cuda_graphs import graph_sizes, pad_decode, padded_size
from engine.runner.inputs import attention_rows, batch_rows
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.images import encoder_input
from tests.engine.tiny_models import IMAGE_TOKEN
from tests.engine.triton_device import HAS_DEVICE


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
    ],
)
def test_few_graph_sizes_cover_all_batches(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes
    for rows in range(1, most + 1):
        size = padded_size(rows, sizes)
        assert size is not None
        assert rows <= size < rows + 8
    assert padded_size(most + 1, sizes) is None


def test_batches_larger_than_all_graphs_run_eagerly() -> None:
    sizes = graph_sizes(4096)
    assert sizes[-1] == 256
    assert len(sizes) < 40
    assert padded_size(257, sizes) is None


def test_rotary_positions_after_images_are_below_sequence_positions(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    engine = driver(checkpoint("qwen2.5-vl").directory)
    tokens = [IMAGE_TOKEN] * 16 + [token % 250 for token in prompt(5)]
    engine.start(0, tokens, images=[encoder_input(1, 0, num_tokens=16)])
    engine.start(1, tokens[16:])
    engine.logits({0: 20, 1: 4})
    runner = engine.runner
    runner._update(plan := engine.plan({0: 1, 1: 1}))
    rows = runner._images.place(batch_rows(plan, runner._table))
    shape = attention_rows(rows, runner._table)
    step = pad_decode(rows, shape, size=4, width=33, scratch_block=0)
    # 16 tokens of 4 rows and columns take 4 positions.
    assert step.positions.tolist() == [8, 4, 0, 0]
    assert step.num_keys.tolist() == [21, 5, 1, 1]


@pytest.mark.skipif(HAS_DEVICE, reason="there, recorded steps are compared with eager ones")
def test_padding_changes_no_results_and_no_other_blocks(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    plain, padded = (driver(checkpoint("llama").directory) for _ in range(2))
    lengths = [3, 20, 9]
    for engine in (plain, padded):
        for slot, length in enumerate(lengths):
            engine.start(slot, prompt(length))
        engine.prefill(0, 1, 2)
    expected = plain.logits({0: 1, 1: 1, 2: 1})

    runner = padded.runner
    runner._update(plan := padded.plan({0: 1, 1: 1, 2: 1}))
    rows = batch_rows(plan, runner._table)
    scratch = len(runner._cache[0]) - 1
    assert not any(layer[scratch].any() for layer in runner._cache)
    step = pad_decode(
        rows, attention_rows(rows, runner._table), size=8, width=33, scratch_block=scratch
    )
    assert step.block_tables.shape == (8, 33)
    before = [layer[:scratch].clone() for layer in runner._cache]
    spec = runner.model.spec
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    runner.model.attention = kernel = KernelAttention(heads, torch.device("cpu"))
    attention = kernel.plan_decodes(step.num_keys, step.block_tables, 256)
    tokens = StepTokens(
        token_ids=torch.from_numpy(step.token_ids),
        positions=torch.from_numpy(step.positions),
        slots=torch.from_numpy(step.cache_slots),
        rows=attention_rows(rows, runner._table),
        plans={None: attention},
    )
    with torch.inference_mode():
        hidden = runner.model(tokens, runner._cache)[:3]
        assert (runner.model.logits(hidden) - expected).abs().max() < 1e-4
    for old, layer in zip(before, runner._cache, strict=True):
        changed = np.flatnonzero((old != layer[:scratch]).flatten(1).any(1).numpy())
        assert set(changed) == set((rows.cache_slots // 8).tolist())
