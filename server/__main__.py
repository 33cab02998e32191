"""`python -m server`: one front end below a supervisor, which sends its launch parameters."""

import sys

from engine.shared.lifeline import Lifeline
from server.front_end import FrontEndLaunch, run

lifeline = Lifeline.from_environment()
sys.exit(run(lifeline.read_launch(FrontEndLaunch), lifeline))
