"""`python -m coordinator`: the coordinator below a supervisor, which sends its settings."""

import sys

from coordinator.config import CoordinatorConfig
from coordinator.process import run
from engine.shared.lifeline import Lifeline

lifeline = Lifeline.from_environment()
sys.exit(run(lifeline.read_launch(CoordinatorConfig), lifeline))
