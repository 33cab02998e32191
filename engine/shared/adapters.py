"""The adapters of a cluster that begins: those of the settings."""

from engine.shared.config import LoraConfig
from engine.shared.messages import AdapterEntry, AdapterSheet


def configured_adapters(config: LoraConfig) -> AdapterSheet | None:
    """Return the first sheet of a cluster; None if its engines compute without adapters."""
    if not config.enable_lora:
        return None
    entries = [
        AdapterEntry(serial, module.name, module.path, confined=False)
        for serial, module in enumerate(config.modules, 1)
    ]
    return AdapterSheet(0, entries)
