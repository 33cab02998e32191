"""Helper processes have lower priority than the process that calls them."""

import os

import pytest

from server.generate.grammar_process import NOTHING
from server.helper_process import HelperProcess

MODULE = "server.generate.grammar_process"


@pytest.mark.slow
def test_helper_shares_cpus_of_parent_at_lower_priority() -> None:
    helper = HelperProcess(MODULE, NOTHING)
    try:
        assert helper.answer(NOTHING, 30.0) is not None
        assert helper._process is not None
        pid = helper._process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpgid(pid) != os.getpgid(0), "signals from the terminal are not for it"
    finally:
        helper.end()
