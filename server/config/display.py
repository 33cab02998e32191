"""Settings for display, without secrets."""

import re
from typing import Any

import msgspec

from engine.shared.config import Section
from engine.shared.settings import changes_of

_SECRET = re.compile(r"(^|_)(key|token|secret|password)s?$")
"""Names of settings with secret values; paths of files with secrets are shown."""

_URL_SECRETS = (
    (re.compile(r"://\S*@"), "://(hidden)@"),
    (re.compile(r"(://[^?]*\?).+"), r"\1(hidden)"),
)
"""The user and password in a URL, and its query, which can contain secrets too."""


def without_secrets(settings: Any) -> Any:
    """Return settings, as builtins, with secrets hidden."""
    if isinstance(settings, str):
        for pattern, hidden in _URL_SECRETS:
            settings = pattern.sub(hidden, settings)
        return settings
    if isinstance(settings, (list, tuple)):
        return [without_secrets(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    return {
        name: "(hidden)" if value and _SECRET.search(name) else without_secrets(value)
        for name, value in settings.items()
    }


def changed_settings(config: Section) -> str:
    """Return one line that lists the settings that differ from their defaults."""
    shown = without_secrets(
        {setting.name: msgspec.to_builtins(value) for setting, value in changes_of(config)}
    )
    return ", ".join(f"{name}={value!r}" for name, value in shown.items()) or "all defaults"
