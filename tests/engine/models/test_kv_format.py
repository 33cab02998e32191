"""Keys and values in 8 bits are those of torch's own conversion, each head with its own scale."""

import pytest
import torch

from engine.models.attention.kv_format import Fp8Kv, KvShape

KEPT = (2, 3, 16)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def empty_cache(fp8: Fp8Kv, kept: KvShape = KEPT) -> torch.Tensor:
    return torch.zeros(5, 8, *fp8.row(kept), dtype=fp8.stored)


def kept_as(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what is read of values [tokens, parts, kv_heads, head_dim] that were written."""
    fp8, kept = Fp8Kv(dtype), (values.shape[1], values.shape[2], values.shape[3])
    cache = empty_cache(fp8, kept)
    fp8.write(cache, torch.arange(len(values)), values)
    return fp8.read(cache.flatten(0, 1)[: len(values)], kept, dtype)


def of_many_sizes(tokens: int, kept: KvShape = KEPT) -> torch.Tensor:
    """Return heads whose values differ from each other's by up to ten orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-6, 5, (tokens, *kept[:2], 1), generator=generator)
    return sizes.clamp(max=1e4) * torch.randn(tokens, *kept, generator=generator).clamp(-5, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [KEPT, (1, 1, 48), (2, 8, 64)])
def test_values_equal_torch_float8(dtype: torch.dtype, kept: KvShape) -> None:
    values = of_many_sizes(40, kept)
    scales = (values.abs().amax(-1, keepdim=True) / 448).bfloat16().float()
    rounded = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(kept_as(values, dtype), (rounded * scales).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_is_off_by_more_than_half_a_unit(dtype: torch.dtype) -> None:
    values = of_many_sizes(40).clamp(-1e4, 1e4)
    largest = values.abs().amax(-1, keepdim=True)
    difference = (kept_as(values, dtype).float() - values).abs()
    # 3 bits behind the first; of the small ones, 18 binary orders below the largest; in float16,
    # besides, what that type keeps.
    smallest = 2.0**-18 * largest + (2.0**-25 if dtype == torch.float16 else 0)
    assert (difference <= (2.0**-4 + 2.0**-8) * values.abs() + smallest).all()


def test_a_token_is_written_to_its_slot_and_to_no_other() -> None:
    fp8 = Fp8Kv(torch.float32)
    cache, values = empty_cache(fp8), of_many_sizes(3)
    fp8.write(cache, torch.tensor([9, 33, 2]), values)
    rows = cache.flatten(0, 1)
    assert torch.equal(fp8.read(rows[[9, 33, 2]], KEPT, torch.float32), kept_as(values))
    others = [slot for slot in range(40) if slot not in (9, 33, 2)]
    assert not rows[others].any()


def test_stored_token_does_not_depend_on_others_in_batch() -> None:
    values = of_many_sizes(12)
    together = kept_as(values)
    assert all(torch.equal(kept_as(values[i : i + 1])[0], together[i]) for i in range(12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    values = torch.zeros(2, *KEPT)
    values[1, :, :, 0] = 3.5  # 448 over a power of two, so that its scale is exact
    assert torch.equal(kept_as(values, dtype), values.to(dtype))
    nothing = Fp8Kv(dtype).read(empty_cache(Fp8Kv(dtype)), KEPT, dtype)
    assert not nothing.any(), "what was never written"


def test_too_large_values_are_clamped() -> None:
    values = torch.full((1, *KEPT), -1e30)
    values[0, 0, 0, 1] = float("inf")
    found = kept_as(values)
    assert (found.abs() == 448 * 2.0**7).all()
    assert found[0, 0, 0, 1] > 0


def test_nan_is_preserved() -> None:
    values = of_many_sizes(2)
    values[0, 1, 2, 3] = float("nan")
    found = kept_as(values, torch.bfloat16)
    assert found[0, 1, 2].isnan().all()
    assert found.isnan().sum() == KEPT[2]
