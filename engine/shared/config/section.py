"""What a group of settings is, and the shorthand in which one setting is written.

A setting is a field of a `Section`: `name: Annotated[TYPE, "Help text."] = DEFAULT`, with a
`msgspec.Meta` between the two where the value has bounds that none of the types below says. From it
come the command-line flag, the `SWELL_*` variable, the YAML key and the row of docs/settings.md
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
    """What a setting of type str may be: one of these words, or the name of a plugin.

    `plugins` is the group of its entry points (`engine.shared.plugins`).
    """

    words: tuple[str, ...]
    plugins: str


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all groups of settings; the docstring's first line is the group's title in --help."""

    def changed(self, **sections: Mapping[str, object]) -> Self:
        """Return the settings with other values for some, by section: `cluster={"node": "a"}`."""
        return msgspec.structs.replace(
            self,
            **{
                name: msgspec.structs.replace(getattr(self, name), **values)
                for name, values in sections.items()
            },
        )
