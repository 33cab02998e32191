"""The initial adapters of a cluster, from the settings."""

from engine.shared.config import LoraConfig
from engine.shared.messages import AdapterEntry, AdapterTable


def configured_adapters(config: LoraConfig) -> AdapterTable | None:
    """Return a new cluster's first adapter table; None if LoRA is disabled."""
    if not config.enable_lora:
        return None
    entries = [
        AdapterEntry(serial, module.name, module.path, confined=False)
        for serial, module in enumerate(config.modules, 1)
    ]
    return AdapterTable(0, entries)
