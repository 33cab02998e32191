"""`python -m server`: a front end run by a supervisor, which sends the launch parameters."""

import sys

from engine.shared.lifeline import Lifeline
from server.front_end import FrontEndLaunch, run

lifeline = Lifeline.from_environment()
sys.exit(run(lifeline.read_launch(FrontEndLaunch), lifeline))
