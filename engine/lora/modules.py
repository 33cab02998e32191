"""The modules of a model that can have adapters, and their decoder tensors; no torch.

In sparse layers PEFT adapts routers, single experts, and modules with all experts of a layer, whose
parameters have an axis of experts (`target_parameters`). For the latter an adapter has one A with
the rows of all experts, and one B whose columns are ordered by rank, then by expert.
"""

from typing import Literal, NamedTuple

from engine.lora.adapter_config import AdapterConfig, BadAdapter
from engine.lora.files import AdapterFiles
from engine.models.families.registry import family_of
from engine.models.spec import ModelSpec, MoeSpec
from engine.models.weights import Source

Kind = Literal["linear", "embedding", "experts"]

_PREFIX = "base_model.model."
_TENSORS: dict[str, tuple[Kind, Literal["a", "b"]]] = {
    ".lora_A.weight": ("linear", "a"),
    ".lora_B.weight": ("linear", "b"),
    ".lora_embedding_A": ("embedding", "a"),
    ".lora_embedding_B": ("embedding", "b"),
}
_EMBEDDING = "model.embed_tokens"
_BLOCKS = ("mlp", "block_sparse_moe")
_ROUTERS = ("gate", "router", "router.layer")
"""Names of sparse blocks and their routers in checkpoints or in transformers."""


class Module(NamedTuple):
    """A module of a checkpoint; some hold several of the decoder's tensors."""

    name: str
    inputs: int
    outputs: int
    parts: dict[str, Source]
    """Slices of the outputs by the decoder's names, without `.weight`."""


class ModulePair(NamedTuple):
    """The tensor names of an adapted module's two matrices."""

    module: Module
    kind: Kind
    a: str
    """[rank, inputs]; of embeddings [rank, vocab]."""
    b: str
    """[outputs, rank]; of embeddings [hidden, rank]."""
    rank: int
    scale: float
    num_experts: int = 1
    """Number of experts in both matrices: A [experts * rank, inputs], B [outputs, rank *
    experts]."""


class AdaptableModules:
    """The modules of one model."""

    def __init__(self, spec: ModelSpec, *, experts_here: bool = True) -> None:
        """Find them; with `experts_here` false, experts cannot be adapted."""
        family = family_of(spec.architecture)
        self._experts_here = experts_here
        self._moe = spec.moe
        self._prefixes = sorted({*family.text_prefixes, "model."}, key=len, reverse=True)
        self._modules: dict[str, Module] = {}
        self._aliases: dict[str, Module] = {}
        """Other names of modules in sparse layers, by transformers and the decoder."""
        self._all_experts: dict[str, tuple[Module, ...]] = {}
        """By the name of a layer's experts: the fused gate and up module, and the down module."""
        sources = family.weights(spec)
        if spec.tie_word_embeddings:
            shape = (spec.vocab_size, spec.hidden_size)
            sources = {**sources, "lm_head.weight": Source(name="lm_head.weight", shape=shape)}
        for name, source in sources.items():
            self._place(name, source)
        for layer in range(spec.num_layers):
            if spec.moe is not None and spec.is_sparse(layer) and experts_here:
                prefix = f"model.layers.{layer}.mlp.experts"
                step = sources[f"{prefix}.0.gate_proj.weight"].row_step
                modules = _all_experts(spec, spec.moe, prefix, step)
                for block in _BLOCKS:
                    self._all_experts[f"model.layers.{layer}.{block}.experts"] = modules

    def _place(self, name: str, source: Source) -> None:
        part, module = name.removesuffix(".weight"), source.name.removesuffix(".weight")
        if part == name or module == source.name:
            return
        if len(source.shape) != 2 or (".experts." in part and not self._experts_here):
            return
        known = self._modules.get(module)
        if known is None:
            outputs, inputs = source.shape
            known = self._modules[module] = Module(module, inputs, outputs, {})
        known.parts[part] = source
        if ".experts." in part:
            self._aliases[part] = known
        elif part.endswith(".router"):
            layer = part.removesuffix("mlp.router")
            for block in _BLOCKS:
                self._aliases |= {f"{layer}{block}.{router}": known for router in _ROUTERS}

    def max_size(self, max_rank: int) -> int:
        """Return the maximum bytes of an adapter, including copies that PEFT saves."""
        sizes = [each.inputs + each.outputs for each in self._modules.values()]
        if self._moe is not None:
            blocks = {id(each): each for each in self._all_experts.values()}.values()
            each_of = [module.inputs + module.outputs for block in blocks for module in block]
            sizes += [self._moe.num_experts * size for size in each_of]
        pairs = sum(sizes)
        whole = [self._modules[name] for name in (_EMBEDDING, "lm_head") if name in self._modules]
        return 4 * (max_rank * pairs + sum(each.inputs * each.outputs for each in whole))

    def pairs(self, files: AdapterFiles, max_rank: int) -> list[ModulePair]:
        """Return the adapted modules of an adapter.

        Raises:
            BadAdapter: it does not match this model, or its rank is too large.
        """
        found: dict[tuple[str, Kind], dict[str, str]] = {}
        for tensor in files.tensors:
            named = self._name(tensor, files)
            if named is not None:
                module, kind, matrix = named
                found.setdefault((module, kind), {})[matrix] = tensor
        if not found:
            raise BadAdapter("the adapter has no tensors")
        pairs = [
            self._pair(module, kind, tensors, files, max_rank)
            for (module, kind), tensors in found.items()
        ]
        adapted: set[str] = set()
        for pair in pairs:
            if not adapted.isdisjoint(pair.module.parts):
                raise BadAdapter(f"the adapter has {_shown(pair.module.name)} twice")
            adapted |= pair.module.parts.keys()
        return pairs

    def _name(self, tensor: str, files: AdapterFiles) -> tuple[str, Kind, str] | None:
        """Return a tensor's module, kind and matrix; None for a copy of the base's own tensor."""
        name = tensor.removeprefix(_PREFIX)
        for suffix, (kind, matrix) in _TENSORS.items():
            if name.endswith(suffix):
                return self._plain(name.removesuffix(suffix)), kind, matrix
        if "lora_magnitude_vector" in name:
            raise BadAdapter("the adapter is trained with DoRA, which is not supported")
        plain = self._plain(name.removesuffix(".weight").removesuffix(".base_layer"))
        base = self._modules.get(plain) if plain in (_EMBEDDING, "lm_head") else None
        if base is None:
            raise BadAdapter(f"{_shown(tensor)} is not part of a LoRA adapter")
        if files.tensors[tensor].shape != (base.outputs, base.inputs):
            raise BadAdapter(f"{_shown(tensor)}: the adapter has another vocabulary size")
        return None

    def _plain(self, module: str) -> str:
        """Return a module's name without the prefixes of multimodal models."""
        if module.rsplit(".", 1)[-1] == "lm_head":
            return "lm_head"
        for prefix in self._prefixes:
            if module.startswith(prefix):
                return "model." + module.removeprefix(prefix)
        return module

    def _pair(
        self, name: str, kind: Kind, tensors: dict[str, str], files: AdapterFiles, max_rank: int
    ) -> ModulePair:
        of_experts = name.removesuffix(".base_layer") in self._all_experts and kind == "linear"
        module = self._modules.get(name) or self._aliases.get(name)
        if not of_experts and (module is None or (kind == "embedding") != (name == _EMBEDDING)):
            if self._moe is not None and ".experts" in name and not self._experts_here:
                raise BadAdapter(
                    f"{_shown(name)}: adapters of experts need all experts in each engine: remove "
                    "--enable-expert-parallel"
                )
            raise BadAdapter(
                f"the adapter is for another model: this one has no module {_shown(name)}"
            )
        if tensors.keys() != {"a", "b"}:
            raise BadAdapter(f"{_shown(name)} has only one of its two matrices")
        if module is None:
            return self._pair_of_experts(name, tensors, files, max_rank)
        config: AdapterConfig = files.config
        rank = _rank(config, name, max_rank)
        inputs, outputs = module.inputs, module.outputs
        if kind == "embedding":  # from a token of the vocabulary to a state
            inputs, outputs = outputs, inputs
        shapes = [files.tensors[tensors[matrix]].shape for matrix in "ab"]
        if shapes != [(rank, inputs), (outputs, rank)]:
            raise BadAdapter(
                f"the adapter is for another model: its matrices for {_shown(name)} are "
                f"{shapes[0]} and {shapes[1]}, here they have to be {(rank, inputs)} and "
                f"{(outputs, rank)}"
            )
        return ModulePair(module, kind, tensors["a"], tensors["b"], rank, config.scale(name))

    def _pair_of_experts(
        self, name: str, tensors: dict[str, str], files: AdapterFiles, max_rank: int
    ) -> ModulePair:
        """Return the pair for one of a layer's two stacked parameters, identified by its shapes.

        PEFT names both after the module; the first one it adapts has the suffix `.base_layer`.
        """
        assert self._moe is not None
        experts, block = self._moe.num_experts, name.removesuffix(".base_layer")
        shapes = [files.tensors[tensors[matrix]].shape for matrix in "ab"]
        expected = []
        for module in self._all_experts[block]:
            parameter = f"{block}.{module.name.rsplit('.', 1)[-1]}"
            rank = _rank(files.config, parameter, max_rank)
            wanted = [(experts * rank, module.inputs), (module.outputs, experts * rank)]
            if shapes == wanted:
                scale = files.config.scale(parameter)
                return ModulePair(
                    module, "experts", tensors["a"], tensors["b"], rank, scale, experts
                )
            expected.append(f"{wanted[0]} and {wanted[1]}")
        raise BadAdapter(
            f"the adapter is for another model: its matrices for {_shown(name)} are {shapes[0]} "
            f"and {shapes[1]}, here they have to be {' or '.join(expected)}"
        )


def _all_experts(
    spec: ModelSpec, moe: MoeSpec, prefix: str, row_step: int
) -> tuple[Module, Module]:
    """Return the modules with all experts of a layer, as in transformers.

    Gates and ups are concatenated, or alternate (`row_step` 2).
    """
    hidden, inner, experts = spec.hidden_size, moe.intermediate_size, range(moe.num_experts)
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    halves = {
        f"{prefix}.{number}.{half}_proj": Source(
            name=gate_up,
            shape=(2 * inner, hidden),
            index=number,
            first_row=first,
            num_rows=inner,
            row_step=row_step,
        )
        for number in experts
        for half, first in (("gate", 0), ("up", inner if row_step == 1 else 1))
    }
    downs = {
        f"{prefix}.{number}.down_proj": Source(name=down, shape=(hidden, inner), index=number)
        for number in experts
    }
    return Module(gate_up, hidden, 2 * inner, halves), Module(down, inner, hidden, downs)


def _rank(config: AdapterConfig, module: str, max_rank: int) -> int:
    rank = config.rank(module)
    if rank > max_rank:
        raise BadAdapter(f"rank {rank} exceeds --max-lora-rank {max_rank}")
    return rank


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:97] + "..."
