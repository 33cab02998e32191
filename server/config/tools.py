"""Settings of `swell doctor`, `fetch`, `models`, `save-sharded-state`, `scale` and `status`."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import Section


class DoctorTarget(Section, frozen=True, kw_only=True):
    """Doctor"""

    host: Annotated[str, "Address on which a server would listen."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535), "Port on which a server would listen."] = 8000


class DoctorConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell doctor`."""

    doctor: DoctorTarget = DoctorTarget()


class FetchTarget(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[str, "Hub id of the model, or org/name:Q4_K_M for one GGUF file."] = ""
    revision: Annotated[str | None, "Branch, tag or commit of a model from the hub."] = None
    text_only: Annotated[
        bool, "Fetch tokenizer and configuration only, which is all that API servers need."
    ] = False


class ShardedTarget(Section, frozen=True, kw_only=True):
    """Sharded state"""

    model: Annotated[str, "Directory of the model, or the hub id of one that was fetched."] = ""
    output: Annotated[str, "Directory that is made for the parts."] = ""
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64), "Processes that the weights are cut for."
    ] = 2


class ShardedConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell save-sharded-state`."""

    sharded: ShardedTarget = ShardedTarget()


class CachedModels(Section, frozen=True, kw_only=True):
    """Models"""

    remove: Annotated[str, "Hub id of a model to remove from the cache."] = ""


class CachedConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell models`."""

    models: CachedModels = CachedModels()


class FetchConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell fetch`."""

    fetch: FetchTarget = FetchTarget()


class ScaleTarget(Section, frozen=True, kw_only=True):
    """Scaling"""

    url: Annotated[str, "Base address of an API server of the node."] = "http://127.0.0.1:8000"
    admin_key: Annotated[str | None, "The node's --admin-key; better given as SWELL_ADMIN_KEY."] = (
        None
    )
    size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        "Number of engines; default: only show the current state.",
    ] = None


class ScaleConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell scale`."""

    scale: ScaleTarget = ScaleTarget()


class StatusTarget(Section, frozen=True, kw_only=True):
    """Status"""

    url: Annotated[str, "Base address of an API server of the node."] = "http://127.0.0.1:8000"
    admin_key: Annotated[
        str | None,
        "The node's --admin-key, better given as SWELL_ADMIN_KEY; without it engines that have "
        "not joined are not shown.",
    ] = None


class StatusConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell status`."""

    status: StatusTarget = StatusTarget()
