"""`python -m engine`: one engine below a supervisor, which sends its launch parameters."""

import logging
import os
import sys

from engine.process.main import run
from engine.shared.config import EngineLaunch
from engine.shared.lifeline import Lifeline
from engine.shared.process_state import raise_descriptor_limit

raise_descriptor_limit()  # of a process below a Ray actor it is the actor's
lifeline = Lifeline.from_environment()
launch = lifeline.read_launch(EngineLaunch)
code = run(launch.config, lifeline, launch.incarnation)
# Everything has been closed in order; taking the interpreter apart under torch can take seconds.
logging.shutdown()
sys.stdout.flush()
os._exit(code)
