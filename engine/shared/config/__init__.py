"""Settings of an engine and of the cluster that it joins, each defined once.

Names follow vLLM where it has the setting.
"""

# ruff: noqa: F403 - the names of these modules are names of this one too
from engine.shared.config.cluster import *
from engine.shared.config.engine import *
from engine.shared.config.execution import *
from engine.shared.config.lora import *
from engine.shared.config.model import *
from engine.shared.config.section import *
