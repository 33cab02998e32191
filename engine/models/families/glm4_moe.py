"""GLM-4.5 to 4.7: experts behind the first layers, one MLP beside them, half-rotated heads."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import LLAMA_NAMES, named_weights
from engine.models.families.reading import grouped_experts, llama_spec, read_rope
from engine.models.spec import ModelSpec, QkNorm

_NAMES = {**LLAMA_NAMES, "correction": "e_score_correction_bias"}


def _spec(config: Config) -> ModelSpec:
    spec = llama_spec(config, rope=read_rope(config))
    qk_norm: QkNorm = "head" if config.get("use_qk_norm") else "none"
    return replace(
        spec,
        output_bias=False,
        qk_norm=qk_norm,
        moe=grouped_experts(config),
    )


FAMILY = Family(
    architectures=("Glm4MoeForCausalLM",),
    spec=_spec,
    weights=partial(named_weights, names=_NAMES),
    has_draft_layers=True,
    carries_normed=True,
)
