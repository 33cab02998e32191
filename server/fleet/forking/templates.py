"""The templates of a node's start."""

import functools
import os
from collections.abc import Sequence

from engine.shared.config import EngineLaunch
from engine.shared.logs import relay_line
from server.config import ServeConfig
from server.fleet.capacity import visible_devices
from server.fleet.forking.choice import forked
from server.fleet.forking.forked_process import can_fork
from server.fleet.forking.template import Template
from server.fleet.holder import Program
from server.fleet.role import Role


async def begin_templates(
    config: ServeConfig, engines: Sequence[Role], front_ends: Sequence[Role]
) -> list[Template]:
    """Start what the settings ask for, and have the holders of these places forked from it.

    Args:
        engines: places of this node that start together.
        front_ends: likewise.
    """
    launches: list[EngineLaunch] = [role.launch(0) for role in engines]
    kinds = forked(
        config,
        [launch.config for launch in launches],
        can_fork=can_fork(),
        devices=visible_devices(os.environ),
    )
    begun = []
    for wanted, roles in ((kinds.engines, engines), (kinds.front_ends, front_ends)):
        if not wanted:
            continue
        first = roles[0]
        program = Program(
            name=f"template of {first.module}",
            module=f"{first.module}.template_main",
            launch=None,
            environment=first.environment,
            inherit=first.inherit,
        )
        template = await Template.begin(
            program,
            launches[0].config if roles is engines else None,
            len(roles),
            functools.partial(relay_line, program.name, config.log.log_format),
        )
        for role in roles:
            role.start = template.start
        begun.append(template)
    return begun


async def close_templates(templates: Sequence[Template]) -> None:
    """End them; once they have ended, nothing is done."""
    for each in templates:
        await each.close()
