"""Models are modules as torch's users know them, and cheap to call."""

import copy

import pytest
import torch
from torch import Tensor, nn

from engine.models.module import Module, add_to, weight_of
from engine.models.moe import Expert
from engine.models.products.dense import DenseLinear
from tests.engine.fixtures import LoadDriver, SaveModel


class Doubled(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Parent(Module, finds_hooks=True):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.child: nn.Module = Doubled()
        self.weight = weight_of(torch.ones(2))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = self.child(x)
        return doubled * self.weight


def test_replaced_submodules_are_found() -> None:
    module = Parent()
    module.weight = weight_of(torch.full((2,), 3.0))
    module.child = nn.Identity()
    assert module(torch.ones(2)).tolist() == [3, 3]
    module.to(torch.float64)
    assert module.weight.dtype == module.table.dtype == torch.float64
    module.load_state_dict({"weight": torch.zeros(2), "table": torch.ones(2)}, assign=True)
    assert module(torch.ones(2)).tolist() == [0, 0]
    assert module.table.tolist() == [1, 1]
    other = copy.deepcopy(module)
    other.weight.fill_(7)
    assert module(torch.ones(2)).tolist() == [0, 0]
    assert other(torch.ones(2)).tolist() == [7, 7]
    del module.table
    assert not hasattr(module, "table")


def test_module_and_global_hooks_are_run() -> None:
    module, seen = Parent(), []
    hook = module.child.register_forward_hook(lambda *given: seen.append(given[2].tolist()))
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda each, *_: seen.append(type(each).__name__)
    )
    module(torch.ones(1))
    assert seen == [[2], "Doubled", "Parent"] or seen == ["Doubled", [2], "Parent"]
    hook.remove()
    everywhere.remove()
    module(torch.ones(1))
    assert len(seen) == 3


def test_a_module_can_have_its_own_forward() -> None:
    module = Parent()
    module.child.forward = lambda x: x * 5
    assert module(torch.ones(2)).tolist() == [5, 5]
    assert Parent()(torch.ones(2)).tolist() == [2, 2]


def test_hook_of_added_product_sees_result_without_sum() -> None:
    product, seen = DenseLinear(torch.eye(2), None), []
    x, sums = torch.ones(1, 2), torch.full((1, 2), 5.0)
    product.register_forward_hook(lambda *given: seen.append(given[2].tolist()))
    assert add_to(sums, product, x).tolist() == [[6, 6]]
    assert seen == [[[1, 1]]]


@torch.inference_mode()
def test_a_block_is_compiled_in_one_graph() -> None:
    block = Expert(DenseLinear(torch.eye(4), None), DenseLinear(torch.ones(4, 2), None))
    x = torch.arange(8.0).view(2, 4)
    plain = block(x)
    block.compile(backend="eager", fullgraph=True)
    assert block._compiled_call_impl is not None
    assert torch.equal(block(x), plain)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek3"])
@torch.inference_mode()
def test_a_decoder_is_a_tree_of_modules(
    name: str, checkpoint: SaveModel, driver: LoadDriver
) -> None:
    engine = driver(checkpoint(name).directory)
    model = engine.runner.model
    assert "(layers): ModuleList" in str(model)
    state = model.state_dict()
    assert "embed_tokens.weight" in state
    assert any(each.startswith("layers.0.self_attn.o_proj.") for each in state)
    assert any(each.startswith("layers.1.mlp.") for each in state)
    seen: list[torch.Size] = []
    layer = model.layers[1]
    for module in (layer, layer.self_attn, layer.mlp):
        module.register_forward_hook(lambda *given: seen.append(given[2].shape))
    engine.start(0, [3, 5, 7])
    hooked = engine.logits({0: 3})
    hidden = model.spec.hidden_size
    assert [size[-1] for size in seen] == [hidden] * 3
    plain = driver(checkpoint(name).directory)
    plain.start(0, [3, 5, 7])
    torch.testing.assert_close(hooked, plain.logits({0: 3}))
