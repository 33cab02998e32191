"""Layer groups of similar sizes that never mix sliding and full layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.cache_groups import MAX_GROUPS, divide, one_group


def gemma3(layers: int, window: int) -> list[int | None]:
    return [None if (layer + 1) % 6 == 0 else window for layer in range(layers)]


@pytest.mark.parametrize(
    ("windows", "longest", "groups", "layers_of_block"),
    [
        ([None] * 32, 8192, [None], 32),
        ([4096] * 32, 32768, [4096], 32),
        ([128, None] * 12, 131072, [128, None], 12),
        (gemma3(26, 512), 32768, [512] * 6 + [None], 4),
        (gemma3(48, 1024), 131072, [1024] * 5 + [None], 8),
        (gemma3(62, 1024), 131072, [1024] * 6 + [None], 10),
        ([20, 20, 20, None] * 16, 65536, [20] * 3 + [None], 16),
        ([None] * 21 + [4096] * 7, 32768, [None] * 3 + [4096], 7),
    ],
)
def test_cache_groups_of_published_models_are_as_expected(
    windows: list[int | None], longest: int, groups: list[int | None], layers_of_block: int
) -> None:
    found = divide(windows, longest)
    assert list(found.windows) == groups
    assert 1 + max(found.tensor_indices(len(windows))) == layers_of_block


@given(
    windows=st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=40),
    longest=st.integers(1, 100),
)
def test_each_layer_has_its_own_index_in_a_group_of_its_kind(
    windows: list[int | None], longest: int
) -> None:
    found = divide(windows, longest)
    assert len(found.windows) <= MAX_GROUPS
    if len(found.windows) == 1:
        assert found == one_group(windows)
        return
    groups = [found.group_of(layer) for layer in range(len(windows))]
    assert [found.windows[group] for group in groups] == windows
    assert len(set(zip(groups, found.tensor_indices(len(windows)), strict=True))) == len(windows)
    assert sorted(set(groups)) == list(range(len(found.windows)))


def test_layers_in_one_group_slide_only_with_equal_windows() -> None:
    assert one_group([7, 7]).windows == (7,)
    assert one_group([7, None]).windows == (None,)
    assert one_group([7, 8]).windows == (None,)
    assert one_group([None]).tensor_indices(1) == [0]
