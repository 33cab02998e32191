"""The list of settings that must be equal on all engines is complete."""

import contextlib

from engine.shared import settings
from engine.shared.config import EngineConfig
from engine.shared.group_config import AGREED_IN_LOCKSTEP, AGREED_SETTINGS, group_config

TRIED: dict[object, tuple[str, ...]] = {
    bool: ("true", "false"), int: ("2", "7"), float: ("2", "7"), str: ("x", "7", "cpu", "cuda"),
}  # fmt: skip


def test_every_setting_that_engines_compare_is_listed_for_the_chart() -> None:
    def stated(**variables: str) -> dict[str, str]:
        return group_config(settings.load(EngineConfig, {}, variables, None), lockstep=True)

    default = stated()
    compared = set()
    for each in settings.settings_of(EngineConfig):
        for value in each.choices or TRIED.get(each.type, ()):
            with contextlib.suppress(Exception):  # not a value of this setting
                if stated(**{each.variable: value}) != default:
                    compared.add(each.name)
    assert len(compared) > 20
    # A group grows: its first size is stated and not compared.
    assert compared - {"data_parallel_size"} <= {*AGREED_SETTINGS, *AGREED_IN_LOCKSTEP}
