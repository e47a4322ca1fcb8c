"""Forked scripts behave like scripts of an interpreter that has just started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import run_script
from tests.processes import is_alive
from tests.servers import wait_until

LOOK = """
import json, os, sys, threading
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(),
    "path": sys.path[0], "main": __name__, "file": __file__, "threads": threading.active_count(),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def test_a_script_sees_what_a_new_interpreter_would_show_it(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    folder = tmp_path / "below"
    folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "LC_ALL": "C.UTF-8"}

    forked = run_script(str(script), "a", "ä", cwd=folder, env=environment, input="typed\n")
    started = subprocess.run(
        [sys.executable, script, "a", "ä"],
        cwd=folder,
        env=environment,
        input=b"typed\n",
        capture_output=True,
        check=False,
    )

    assert (forked.returncode, forked.stderr) == (7, b"to stderr\n") == (started.returncode, started.stderr)
    assert json.loads(forked.stdout) == json.loads(started.stdout)


@pytest.mark.parametrize(
    ("code", "ended"),
    [("pass", 0), ("raise SystemExit", 0), ("raise SystemExit('why')", 1), ("1 / 0", 1), ("os.abort()", -6)],
)
def test_the_exit_code_of_the_script_is_reported(tmp_path: Path, code: str, ended: int) -> None:
    (tmp_path / "end.py").write_text(f"import os\n{code}\n")

    run = run_script(f"{tmp_path}/end.py", cwd=tmp_path, env={"PATH": os.environ["PATH"]})

    assert run.returncode == ended
    assert bool(run.stderr) == (ended == 1)


def test_what_runs_at_exit_and_in_threads_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('in a thread'))).start()\n"
    )

    run = run_script(f"{tmp_path}/end.py", cwd=tmp_path, env={"PATH": os.environ["PATH"]})

    assert run.stdout == b"in a thread\nat exit\n"


def test_a_script_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )

    with pytest.raises(subprocess.TimeoutExpired):
        run_script(f"{tmp_path}/hang.py", cwd=tmp_path, env={"PATH": os.environ["PATH"]}, timeout=1)

    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), what="the script is killed")
