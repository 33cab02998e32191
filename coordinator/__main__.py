"""`python -m coordinator`: the coordinator below a supervisor, which sends what it has to know."""

import sys

from coordinator.config import CoordinatorLaunch
from coordinator.process import run
from engine.shared.cpu.machine import bind_process
from engine.shared.lifeline import Lifeline

lifeline = Lifeline.from_environment()
launch = lifeline.read_launch(CoordinatorLaunch)
bind_process(launch.cpus)
sys.exit(
    run(
        launch.config,
        lifeline,
        has_predecessors=launch.has_predecessors,
        planned_engines=launch.planned_engines,
    )
)
