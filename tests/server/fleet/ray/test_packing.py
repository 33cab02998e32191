"""Placement of ranks on nodes by strategy, and the errors if they do not fit."""

from collections import Counter

import pytest

from server.fleet.ray.packing import Packing, PackStrategy, RayNode, max_ranks_per_node

NEEDS = {"CPU": 2.0, "slot": 1.0}


def node(name: str, slots: int, free: int | None = None) -> RayNode:
    def there(count: int) -> dict[str, float]:
        return {"CPU": 2.0 * count, "slot": float(count)}

    return RayNode(f"id-{name}", name, there(slots), there(slots if free is None else free))


NODES = [node("head", 2), node("b", 3), node("c", 1), node("d", 4)]


@pytest.mark.parametrize(
    ("strategy", "per_node", "ranks", "expected"),
    [
        ("strict", 2, 6, {"head": 2, "b": 2, "d": 2}),
        ("strict", 3, 6, {"b": 3, "d": 3}),
        ("strict", 3, 4, {"b": 3, "d": 1}),
        ("strict", 1, 3, {"head": 1, "b": 1, "c": 1}),
        ("strict", 5, 5, {}),
        ("fill", None, 3, {"head": 2, "b": 1}),
        ("fill", None, 10, {"head": 2, "b": 3, "c": 1, "d": 4}),
        ("fill", None, 11, {"head": 2, "b": 3, "c": 1, "d": 4}),
        ("span", None, 6, {"head": 2, "b": 3, "c": 1}),
        ("fill", 1, 5, {"head": 1, "b": 3, "c": 1}),
        ("fill", 0, 5, {"b": 3, "c": 1, "d": 1}),
        ("fill", 3, 5, {}),
        ("strict", None, 3, {"b": 3}),
        ("strict", None, 5, {}),
    ],
)
def test_ranks_are_planned_according_to_strategy(
    strategy: PackStrategy, per_node: int | None, ranks: int, expected: dict[str, int]
) -> None:
    planned = Packing(strategy, NEEDS, per_node, "id-head").plan(NODES, ranks)
    assert Counter(each.name for each in planned) == expected
    assert [each.name for each in planned] == sorted(
        (each.name for each in planned), key=["head", "b", "c", "d"].index
    )
    assert max_ranks_per_node(planned) == max(expected.values(), default=1)


def test_rank_goes_to_free_node_and_avoids_node_of_lost_rank() -> None:
    nodes = [node("head", 2, free=0), node("b", 3, free=1), node("c", 1)]
    fill = Packing("fill", NEEDS)
    assert fill.choose(nodes, {}).node == nodes[1]
    assert fill.choose(nodes, {}, avoid={"id-b"}).node == nodes[2]
    assert fill.choose(nodes[:2], {}, avoid={"id-b"}).node == nodes[1]


def test_missing_resources_are_those_insufficient_on_every_node() -> None:
    def with_free(cpus: float, slots: float) -> RayNode:
        return node("a", 2)._replace(free={"CPU": cpus, "slot": slots})

    fill = Packing("fill", NEEDS)
    assert fill.choose([with_free(0, 5), with_free(1, 0)], {}).lacks == "CPU"
    assert fill.choose([with_free(2, 0), with_free(0, 1)], {}).lacks == "CPU, slot"
    assert fill.choose([], {}).lacks == "CPU, slot"
    assert fill.choose([with_free(2, 1)], {}).lacks == ""


def test_unreported_ranks_count_as_placed() -> None:
    """Free resources are reported with a delay, so recently placed ranks are tracked here."""
    nodes = [node("head", 2), node("b", 1)]
    fill = Packing("fill", NEEDS)
    assert fill.choose(nodes, {"id-head": 1}).node == nodes[0]
    assert fill.choose(nodes, {"id-head": 2}).node == nodes[1]
    assert fill.choose(nodes, {"id-head": 2, "id-b": 1}).node is None


def test_strict_keeps_its_number_for_ranks_that_are_placed_again() -> None:
    strict = Packing("strict", NEEDS, 2)
    nodes = [node("d", 4)]
    assert strict.choose(nodes, {"id-d": 1}).node == nodes[0]
    choice = strict.choose(nodes, {"id-d": 2})
    assert choice.node is None
    assert "d 8 of 8 CPU and 4 of 4 slot, as many ranks as it may have" in choice.reason
    assert strict.full({"id-d": 2, "id-e": 1}) == ["id-d"]
    assert Packing("fill", NEEDS, 2, "id-head").full({"id-d": 9}) == []


def test_added_ranks_go_to_any_free_node_without_limit() -> None:
    nodes = [node("head", 4), node("b", 3)]
    strict = Packing("strict", NEEDS, None, "id-head")
    assert strict.choose(nodes, {"id-head": 2}).node == nodes[0]
    assert strict.full({"id-head": 2}) == []
    fill = Packing("fill", NEEDS, 2, "id-head")
    assert fill.choose(nodes, {"id-head": 1}).node == nodes[0]
    assert fill.choose(nodes, {"id-head": 2}).node == nodes[1]
    assert fill.full({"id-head": 2, "id-b": 9}) == ["id-head"]
    assert Packing("fill", NEEDS, 0, "id-head").full({}) == ["id-head"]


def test_head_without_resources_for_its_ranks_is_refused() -> None:
    refused = Packing("fill", NEEDS, 3, "id-head").refusal(NODES, 4)
    assert refused is not None
    assert "--data-parallel-size-local wants 3 ranks on the supervisor's node" in refused


def test_refusal_lists_needed_and_free_resources_with_advice() -> None:
    nodes = [node("head", 2, free=1), node("b", 1)]
    assert Packing("fill", NEEDS).refusal(nodes, 2) is None
    refused = Packing("fill", NEEDS).refusal(nodes, 3)
    assert refused is not None
    assert "room for 2 of 3 ranks. Each needs 2 CPU and 1 slot." in refused
    assert "head 2 of 4 CPU and 1 of 2 slot; b 2 of 2 CPU and 1 of 1 slot" in refused
    assert "--ray-wait-for-nodes" in refused
    strict = Packing("strict", NEEDS, 2).refusal(nodes, 2)
    assert strict is not None
    assert "--data-parallel-size-local" in strict


def test_rank_larger_than_any_node_is_refused() -> None:
    refused = Packing("span", {"GPU": 8.0}).refusal(
        [RayNode("a", "a", {"GPU": 4.0}, {"GPU": 4.0}), RayNode("b", "b", {}, {})], 1
    )
    assert refused is not None
    assert "lower --tensor-parallel-size" in refused


def test_a_shortage_in_a_large_cluster_is_summarized() -> None:
    nodes = [node(str(number), 1, free=0) for number in range(100)]
    refused = Packing("fill", {"memory": 2.0**31}).refusal(nodes, 1)
    assert refused is not None
    assert "Each needs 2.0 GiB memory" in refused
    assert "; 92 more nodes" in refused
    assert "no nodes at all" in (Packing("fill", NEEDS).refusal([], 1) or "")
