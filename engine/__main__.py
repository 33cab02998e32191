"""`python -m engine`: one engine below a supervisor, which sends its launch parameters."""

import sys

from engine.config import EngineLaunch
from engine.lifeline import Lifeline
from engine.process import run

lifeline = Lifeline.from_environment()
launch = lifeline.read_launch(EngineLaunch)
sys.exit(run(launch.config, lifeline, launch.incarnation))
