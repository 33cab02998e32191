"""Settings of the model and of its KV cache."""

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from engine.shared.config.section import NonNegativeInt, PositiveInt, Section

BUNDLED_MODEL = Path(__file__).parent.parent.parent / "bundled_model"
BUNDLED_MODEL_NAME = "swell-shakespeare"


class ModelConfig(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[
        str,
        "Directory or hub id of a Hugging Face model, or a GGUF file, local or on the hub "
        "(org/name:Q4_K_M); default: the bundled model.",
    ] = str(BUNDLED_MODEL)
    served_model_name: Annotated[
        tuple[str, ...], "Name(s) that clients use for the model; default: its directory or id."
    ] = ()
    revision: Annotated[str | None, "Branch, tag or commit of a model from the hub."] = None
    weights_dir: Annotated[
        str | None,
        "Directory from which /admin/weights can load checkpoints; default: hub ids only.",
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        "Type of weights and activations; auto: the checkpoint's, or float32 for small models on "
        "CPUs without fast 16-bit arithmetic.",
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "stored"] | None,
        "Quantization of linear layers on the CPU. int8: weights in 8 bits, and activations where "
        "the CPU has exact 8-bit products; int4: weights in 4 bits, the least memory; stored: only "
        "weights that the checkpoint stores in 4 bits; default: none. Quantized checkpoints are "
        "dequantized to --dtype, except with --dtype auto on AVX2-only x86 CPUs.",
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy", "sharded_state"],
        "auto: read the checkpoint; dummy: random weights from --seed; sharded_state: read the "
        "shards that `swell save-sharded-state` wrote for this --tensor-parallel-size.",
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "swell", "transformers"],
        "Model implementation. swell: built in; transformers: the transformers backend (install "
        "the extra) over the paged KV cache; auto: swell if it supports the architecture.",
    ] = "auto"
    language_model_only: Annotated[
        bool,
        "Serve a vision-language model without images: its vision encoder is not loaded, and any "
        "prompt can be prefilled in parts. Set it for engines and API servers alike.",
    ] = False
    limit_mm_per_prompt: Annotated[
        str,
        'JSON object with the maximum images of a request, e.g. `{"image": 4}`; 0 refuses images, '
        "and vLLM engines then load no vision encoder.",
    ] = '{"image": 32}'
    max_model_len: Annotated[
        PositiveInt | None, "Maximum tokens of a sequence; default: the model's own limit."
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        "Task of the model; pooling: embeddings and scores; auto: pooling for encoders, "
        "classifiers and models with the files of sentence-transformers, else generate.",
    ] = "auto"
    pooler_config: Annotated[
        str,
        "JSON object that overrides the pooling settings in the model's files: `pooling_type`"
        " (CLS, MEAN, LAST or MAX; ALL or STEP for one result per token), `normalize`, "
        "`use_activation`, `activation`, `logit_mean`, `logit_sigma`, `max_embed_len`, "
        "`dimensions`, `step_tag_id`, `task`.",
    ] = "{}"
    seed: Annotated[int, "Seed of dummy weights."] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], "Where the model runs."] = "auto"
    generation_config: Annotated[
        str,
        "Source of the defaults of temperature, top_p etc.; auto: the model's "
        "generation_config.json; vllm or none: neutral values; else: a directory with such a "
        "file.",
    ] = "auto"
    override_generation_config: Annotated[
        str,
        "JSON object of sampling defaults that override those of the file, e.g. "
        '`{"temperature": 0.2}`.',
    ] = "{}"
    chat_template: Annotated[
        str | None,
        "Jinja file that replaces the model's chat template, or the template itself.",
    ] = None
    default_chat_template_kwargs: Annotated[
        str,
        "JSON object of arguments of the chat template that requests do not set themselves, e.g. "
        '`{"enable_thinking": false}`.',
    ] = "{}"

    def __post_init__(self) -> None:
        self.max_images  # noqa: B018 - validates the setting

    @property
    def max_images(self) -> int:
        """Maximum images per request.

        Raises:
            ValueError: `limit_mm_per_prompt` is malformed.
        """
        limits: Any = None
        with contextlib.suppress(ValueError):
            limits = json.loads(self.limit_mm_per_prompt)
        wrong = ValueError('limit_mm_per_prompt must be a JSON object such as {"image": 4}')
        if not isinstance(limits, dict):
            raise wrong
        if unknown := limits.keys() - {"image", "video", "audio"}:
            raise ValueError(f"limit_mm_per_prompt: {min(unknown)} is not image, video or audio")
        max_images = limits.get("image", 32)
        if type(max_images) is not int or not 0 <= max_images <= 1024:
            raise wrong
        return max_images


class CacheConfig(Section, frozen=True, kw_only=True):
    """KV cache"""

    block_size: Annotated[
        int, Meta(ge=1, le=256), "Tokens per KV block; default with CUDA devices: 64."
    ] = 16
    num_kv_blocks: Annotated[
        PositiveInt | None,
        "Number of KV blocks for each cache group (one, unless only some layers have a sliding "
        "window); default: sized from memory.",
    ] = None
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None,
        "Memory for the KV cache of one engine; default: a share of free memory.",
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        "Share of a CUDA device's memory for weights, activations and KV cache of one engine.",
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3"],
        "Storage type of keys and values. auto: the type that they are computed in; fp8, or "
        "fp8_e4m3: 8 bits, with a scale per token and head, for about twice the tokens in the same "
        "memory.",
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, "Reuse the KV blocks of prompts that begin with the same tokens."
    ] = True
    encoder_cache_bytes: Annotated[
        PositiveInt,
        "Memory per engine for encoded images, so that repeated images are not encoded again. At "
        "least one image fits.",
    ] = 256 << 20
    kv_memory_tier_bytes: Annotated[
        PositiveInt | None,
        "Host memory (in /dev/shm) for KV blocks shared by all engines of the node: a prefix "
        "computed by one can be read by the others, and after a restart; default: none.",
    ] = None
    kv_disk_tier_dir: Annotated[
        str | None,
        "Directory for KV blocks that outlive all engines; private to its user; default: none.",
    ] = None
    kv_disk_tier_bytes: Annotated[
        PositiveInt, "Maximum size of --kv-disk-tier-dir; least recently used blocks are removed."
    ] = 16 << 30
    kv_tier_policy: Annotated[
        Literal["all", "evicted"],
        "What --kv-memory-tier-bytes and --kv-disk-tier-dir store. all: every full block as soon "
        "as it is computed; evicted: blocks that leave the KV cache.",
    ] = "all"
    kv_role: Annotated[
        Literal["prefill", "decode", "both"] | None,
        "Role of an engine in disaggregated prefill; prefill: compute long prompts and offer their "
        "KV blocks; decode: read them and generate; both: like decode, and like prefill if an "
        "external router requests it; default: no transfer of KV blocks, unless --prefill-engines "
        "is set.",
    ] = None
    prefill_engines: Annotated[
        NonNegativeInt,
        "Number of engines, those of the lowest ranks, with --kv-role prefill; the others get "
        "decode. 0: --kv-role applies to all engines of this command.",
    ] = 0
    kv_transfer_bytes: Annotated[
        PositiveInt,
        "Memory per engine for copies of KV blocks until another engine reads them; blocks that do "
        "not fit are recomputed there.",
    ] = 1 << 30
    kv_transfer_config: Annotated[
        str | None,
        "JSON object with vLLM's keys, for --kv-role, --kv-transfer-bytes and connectors of "
        "plugins (docs/kv.md).",
    ] = None
    kv_events_config: Annotated[
        str | None,
        "JSON object with vLLM's keys: engines publish the KV blocks that they store and remove, "
        "for external routers (docs/kv.md); default: off.",
    ] = None
