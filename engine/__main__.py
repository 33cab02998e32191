"""`python -m engine`: one engine below a supervisor, which sends its launch parameters."""

import logging
import os
import sys

from engine.config import EngineLaunch
from engine.lifeline import Lifeline
from engine.process import run

lifeline = Lifeline.from_environment()
launch = lifeline.read_launch(EngineLaunch)
code = run(launch.config, lifeline, launch.incarnation)
# Everything has been closed in order; taking the interpreter apart under torch can take seconds.
logging.shutdown()
sys.stdout.flush()
os._exit(code)
