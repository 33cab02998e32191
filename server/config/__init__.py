"""Settings of the front ends and the supervisor; conventions: `engine.shared.config.section`."""

# ruff: noqa: F403 - the names of these modules are names of this one too
from server.config.commands import *
from server.config.fleet import *
from server.config.http import *
from server.config.load import *
from server.config.media import *
from server.config.store import *
