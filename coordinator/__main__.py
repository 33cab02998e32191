"""`python -m coordinator`: run under a supervisor, which sends the launch parameters."""

import sys

from coordinator.config import CoordinatorLaunch
from coordinator.process import run
from engine.shared.lifeline import Lifeline

lifeline = Lifeline.from_environment()
sys.exit(run(lifeline.read_launch(CoordinatorLaunch), lifeline))
