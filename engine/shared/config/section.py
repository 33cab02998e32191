"""Base class of a group of settings, and shorthands for declaring one.

A setting is a field of a `Section`: `name: Annotated[TYPE, "Help text."] = DEFAULT`, with a
`msgspec.Meta` between the two if none of the types below expresses the value's bounds. It defines
the command-line flag, the `SWELL_*` variable, the YAML key and the row of docs/settings.md
(`engine.shared.settings`).
"""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class OneOf(NamedTuple):
    """Allowed values of a str setting: one of these words, or the name of a plugin.

    `plugins` is the entry-point group (`engine.shared.plugins`).
    """

    words: tuple[str, ...]
    plugins: str


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all groups of settings; the docstring's first line is the group's title in --help."""

    def changed(self, **sections: Mapping[str, object]) -> Self:
        """Return a copy with values replaced, given by section: `cluster={"node": "a"}`."""
        return msgspec.structs.replace(
            self,
            **{
                name: msgspec.structs.replace(getattr(self, name), **values)
                for name, values in sections.items()
            },
        )
