"""The options of ``penstock worker`` reach the worker: flags first, then settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Shell, until

TELLING = """
import json

from penstock import App


class Telling(App):
    def worker(self, **options):
        print(json.dumps(options))
        raise SystemExit


app = Telling()
"""

KNOWS_ONE = """
from penstock import App

app = App()


@app.task(queue="mail")
def answer() -> str:
    return "done"
"""


@pytest.fixture
def options(penstock: Shell, tmp_path: Path) -> Any:
    (tmp_path / "tasks.py").write_text(TELLING)
    return lambda *flags, **env: json.loads(penstock.ok("worker", "tasks:app", *flags, env=env))


def test_stuck_after_and_unknown_after_are_flags_and_keys(penstock: Shell, options: Any) -> None:
    assert options()["stuck_after"] == "5m"
    assert "unknown_after" not in options()  # the worker's own default depends on burst
    penstock.ok("config", "set", "stuck_after", "2min")
    penstock.ok("config", "set", "unknown_after", "1 day")
    assert (options()["stuck_after"], options()["unknown_after"]) == ("2m", "1d")
    named = options(PENSTOCK_STUCK_AFTER="90s", PENSTOCK_UNKNOWN_AFTER="0")
    assert (named["stuck_after"], named["unknown_after"]) == ("1m30s", "0s")
    flags = options("--stuck-after", "1h", "--unknown-after", "30")
    assert (flags["stuck_after"], flags["unknown_after"]) == ("1h", "30s")


def test_a_worker_fails_a_job_of_an_unknown_task_after_the_time_of_the_flag(
    penstock: Shell, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(KNOWS_ONE)
    penstock.ok("enqueue", "--task", "nobody", "-q", "mail", "--attempts", "1")
    worker = penstock.start("worker", "tasks:app", "--unknown-after", "0s")
    try:
        until(lambda: penstock.json("list", "failed"))
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
