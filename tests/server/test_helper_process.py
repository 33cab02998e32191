"""Helper processes have a lower priority than their caller, and a limit of memory."""

import os
import resource

import pytest

from server.generate.grammar_process import NOTHING
from server.helper_process import HelperProcess
from server.limits import MAX_CHECK_MEMORY

MODULE = "server.generate.grammar_process"


@pytest.mark.slow
def test_helper_shares_cpus_of_parent_at_lower_priority_and_has_bounded_memory() -> None:
    helper = HelperProcess(MODULE, NOTHING)
    try:
        assert helper.answer(NOTHING, 30.0) is not None
        assert helper._process is not None
        pid = helper._process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpgid(pid) != os.getpgid(0), "signals from the terminal are not for it"
        limit, _ = resource.prlimit(pid, resource.RLIMIT_AS)
        assert limit == MAX_CHECK_MEMORY
    finally:
        helper.end()
