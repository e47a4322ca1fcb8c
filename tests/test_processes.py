"""A run of the tests that is killed leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import until
from tests.processes import is_alive

RUN = """
import subprocess, time
from tests.processes import leave_nothing_behind

leave_nothing_behind()
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_has_started_ends_with_it() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert run.stdout is not None
    with run:
        started = int(run.stdout.readline())
        assert is_alive(started)
        run.kill()
    until(lambda: not is_alive(started))
