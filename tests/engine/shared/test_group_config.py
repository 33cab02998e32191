"""The list of settings on which engines have to agree is complete."""

import contextlib

from engine.shared import settings
from engine.shared.config import EngineConfig
from engine.shared.group_config import AGREED_IN_LOCKSTEP, AGREED_SETTINGS, group_config

TRIED = (
    "true", "false", "2", "7", "x", "cpu", "cuda", "int8", "fp8", "float32", "wait", "level",
    "fcfs", "generate", "pooling", "dummy", "safetensors", "transformers",
)  # fmt: skip


def test_every_setting_that_engines_compare_is_listed_for_the_chart() -> None:
    def stated(**variables: str) -> dict[str, str]:
        return group_config(settings.load(EngineConfig, {}, variables, None), lockstep=True)

    default = stated()
    compared = set()
    for each in settings.settings_of(EngineConfig):
        for value in TRIED if each.name != "model" else ():
            with contextlib.suppress(Exception):  # not a value of this setting
                if stated(**{each.variable: value}) != default:
                    compared.add(each.name)
    assert len(compared) > 20
    # A group grows: its first size is stated and not compared.
    assert compared - {"data_parallel_size"} <= {*AGREED_SETTINGS, *AGREED_IN_LOCKSTEP}
