"""With --batch-invariant, logits are bit-identical for any batch composition.

That holds for any chunking of the prompt, and for decoded as well as recomputed tokens.
"""

from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.processor import float32_is_faster
from engine.models.attention.interface import Heads
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows
from engine.models.products.dense import prepare_linear
from engine.models.products.row_blocks import SIZES, RowBlocks, probe_rows
from engine.models.spec import UnsupportedModel
from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import SamplingParams
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel

LENGTH = 140
ALONE = (*[1] * 8, 52, *[1] * 8, 56, *[1] * 16)
"""Tokens of each step of one sequence by itself: decodes at its beginning and its end and around
64 tokens and 128, where kernels begin other blocks of keys, and two chunks between them."""
CAPS_SCORES = has_pairs() and not float32_is_faster()
"""Whether there is a per-token attention kernel with capped scores."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-biased", {}),
    ("mistral-window", {}),
    ("qwen3-moe-many", {}),
    ("qwen2", {"dtype": "bfloat16"}),
    ("gemma3", {"dtype": "bfloat16"}),
    ("olmo2", {}),
    ("cohere-normed", {}),
    ("granite-moe", {"dtype": "bfloat16"}),
    ("glm4-moe-normed", {}),
    ("gpt-oss", {}),
    ("gpt-oss-mxfp4", {"dtype": "bfloat16"}),
    ("deepseek3", {}),
    ("deepseek2", {"dtype": "bfloat16"}),
    ("bundled", {"dtype": "float32"}),
    ("bundled", {"dtype": "bfloat16", "quantization": "int8"}),
    ("llama-biased", {"kv_cache_dtype": "fp8"}),
    ("mistral-window", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    ("gpt-oss", {"kv_cache_dtype": "fp8"}),
    ("deepseek3", {"kv_cache_dtype": "fp8"}),
    ("bundled", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    ("bundled", {"dtype": "bfloat16", "fused": True}),
    ("qwen3-moe", {"dtype": "bfloat16", "fused": True}),
    ("gemma3", {"dtype": "bfloat16", "fused": True}),
    ("llama4", {"dtype": "bfloat16", "fused": True}),
    ("llama-biased", {"dtype": "bfloat16", "fused": True}),
    ("mistral-window", {"dtype": "bfloat16", "fused": True}),
    ("mixtral", {"dtype": "bfloat16", "fused": True}),
    ("qwen3-moe-blocks", {"dtype": "bfloat16", "fused": True}),
    ("glm4-moe-blocks", {"dtype": "bfloat16", "fused": True}),
    ("llama4-blocks", {"dtype": "bfloat16", "fused": True}),
    ("gpt-oss", {"dtype": "bfloat16", "fused": True}),
    ("deepseek3", {"dtype": "bfloat16", "fused": True}),
    *([("gemma2", {"dtype": "bfloat16", "fused": True})] if CAPS_SCORES else []),
]


CUDA_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-biased", {"dtype": "bfloat16"}),
    ("mistral-window", {"dtype": "bfloat16", "fused": True}),
    ("qwen3", {"dtype": "float16"}),
    ("gemma2", {"dtype": "bfloat16"}),
    ("gemma3", {"dtype": "bfloat16", "fused": True}),
    ("olmo2", {"dtype": "bfloat16"}),
    ("cohere-normed", {"dtype": "bfloat16"}),
    ("qwen2", {"dtype": "bfloat16", "fused": True}),
]
on_cuda = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
ALL_CASES = [
    *CASES,
    *(
        pytest.param(name, {**settings, "device": torch.device("cuda")}, marks=on_cuda)
        for name, settings in CUDA_CASES
    ),
]


@pytest.mark.parametrize(("name", "settings"), ALL_CASES)
def test_token_is_computed_and_sampled_alike_in_any_batch(
    name: str,
    settings: dict[str, Any],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    directory = BUNDLED_MODEL if name == "bundled" else checkpoint(name).directory
    engine = driver(directory, batch_invariant=True, **settings)
    tokens = prompt(LENGTH)
    engine.start(0, tokens)
    alone = torch.cat([engine.logits({0: count}) for count in ALONE])

    engine.start(1, tokens)
    assert torch.equal(engine.logits({1: LENGTH}), alone), "in one step"

    engine.start(2, tokens)
    parts = [engine.logits({2: count}) for count in (5, 70, 1, 13, 50, 1)]
    assert torch.equal(torch.cat(parts), alone), "in chunks"

    for slot in range(3, 18):  # shorter ones than the others' 60 tokens, and longer ones
        engine.start(slot, prompt(3 * slot if slot < 14 else 7 * slot))
    engine.prefill(*range(3, 16))
    engine.start(2, tokens)
    first = engine.logits({**dict.fromkeys(range(3, 16), 1), 2: 60, 16: 100})[13:73]
    assert torch.equal(first, alone[:60]), "beside decodes and another prompt"
    one = engine.logits({**dict.fromkeys(range(3, 16), 1), 2: 1, 17: 50})[13]
    assert torch.equal(one, alone[60]), "as one of many decodes"

    reported = SamplingParams(max_tokens=1, seed=1, temperature=0.0, logprobs=3)
    for slot in (0, 1, 2):
        engine.start(slot, tokens, reported)
    engine.step({0: LENGTH - 1})
    decoded = engine.step({0: 1})
    assert engine.prefill(1).logprobs == decoded.logprobs, "drawn after a prompt"
    engine.start(3, prompt(60))
    engine.prefill(3)
    beside = engine.step({3: 1, 2: LENGTH})
    assert (beside.logprobs or [])[1:] == decoded.logprobs, "drawn beside a decode"


def test_capped_scores_are_refused_on_cpus(checkpoint: SaveModel, driver: LoadDriver) -> None:
    with pytest.raises(UnsupportedModel, match=r"batch-invariant.*Gemma2ForCausalLM"):
        driver(checkpoint("gemma2").directory, batch_invariant=True)


def test_product_rows_do_not_affect_each_other() -> None:
    def row_sums_by_count(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1, keepdim=True) * (1 + len(x) * 1e-3)

    blocks = RowBlocks(row_sums_by_count, probe_rows(8, torch.float32))
    x = torch.randn(150, 8)
    whole = blocks(x)
    assert all(torch.equal(blocks(x[:n]), whole[:n]) for n in (1, 2, 15, 16, 17, 64, 100))
    assert torch.equal(blocks(x[77:78]), whole[77:78])


def test_sizes_that_agree_are_all_used() -> None:
    seen = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x * 2

    blocks = RowBlocks(double, probe_rows(8, torch.float32))
    seen.clear()
    x = torch.randn(87, 8)
    assert torch.equal(blocks(x), x * 2)
    assert seen == [64, 16, 4, 4]
    assert set(seen) <= set(SIZES)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (320, 192), (600, 450)])
def test_product_row_has_same_bits_in_batch_of_any_size(
    outputs: int, inputs: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    product = prepare_linear(torch.randn(outputs, inputs, generator=generator))
    blocks = RowBlocks(product, probe_rows(inputs, torch.float32))
    x = torch.randn(300, inputs, generator=generator)
    whole = blocks(x)
    for rows in (*range(1, 66), 100, 257):
        first = 13 * rows % (300 - rows)
        part = blocks(x[first : first + rows].clone())
        assert torch.equal(part, whole[first : first + rows]), rows


def test_functions_with_one_kernel_are_tried_once() -> None:
    calls = []

    class Product:
        kernel = ("a kernel of this test", 64)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return x + 1

    first = RowBlocks(Product(), probe_rows(8, torch.float32))
    assert calls
    calls.clear()
    second = RowBlocks(Product(), probe_rows(8, torch.float32))
    assert not calls
    assert second.sizes == first.sizes


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "has_sinks"),  # covers every pair of values
    [
        (torch.float32, (4, 1), 64, False),
        (torch.float32, (14, 2), 48, True),  # matrix units treat other sizes differently
        (torch.float32, (4, 4), 64, True),
        (torch.bfloat16, (4, 1), 48, True),
        (torch.bfloat16, (14, 2), 64, False),
        (torch.bfloat16, (4, 4), 48, False),
    ],
)
def test_joint_attention_has_bits_of_single_tokens(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, has_sinks: bool
) -> None:
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    attention = PagedAttention(
        Heads(num_heads, kv_heads, head_dim),
        dtype=dtype,
        device=torch.device("cpu"),
        token_by_token=True,
    )
    cache = torch.randn(40, 16, 2, kv_heads, head_dim, generator=generator).to(dtype)
    queries = torch.randn(600, num_heads, head_dim, generator=generator).to(dtype)
    sinks = torch.randn(num_heads, generator=generator) if has_sinks else None

    def attend(*rows: tuple[int, int]) -> torch.Tensor:
        """Attend from some rows, each with this many tokens from a position on."""
        starts, counts = (np.array(each) for each in zip(*rows, strict=True))
        shape = AttentionRows(
            starts=starts,
            counts=counts,
            first_token=np.cumsum(counts) - counts,
            block_tables=np.arange(40, dtype=np.int32)[None].repeat(len(rows), 0),
            block_size=16,
        )
        chosen = torch.cat([queries[start : start + count] for start, count in rows])
        return attention.attend(chosen, cache, attention.plan(shape, None), sinks)

    whole = attend((0, 600))
    for start, count in ((0, 1), (5, 40), (60, 70), (199, 1), (128, 64), (150, 333), (599, 1)):
        assert torch.equal(attend((start, count)), whole[start : start + count]), (start, count)
    decodes = (3, 64, 190, 192, 255, 300, 383, 400, 511, 512, 590)
    together = attend(*((position, 1) for position in decodes), (100, 30))
    assert torch.equal(together[: len(decodes)], whole[list(decodes)])
    prompts = ((0, 9), (0, 2), (5, 40), (7, 9), (60, 20), (130, 63), (500, 30), (536, 64), (3, 1))
    together = attend(*prompts)
    tokens = torch.cat([torch.arange(start, start + count) for start, count in prompts])
    assert torch.equal(together, whole[tokens])
