"""What the worker processes of a run print on the stderr that they share with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from penstock import App

SCRIPT = """
from penstock import App

app = App("memory://")

@app.task(queue="rows", attempts=1)
def score(n: int) -> None:
    raise ValueError(f"row {n}")
"""


def test_a_failed_row_is_not_printed_because_it_comes_back_as_a_row(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)
    app.sync.queue("rows").enqueue({"n": 1}, task="score", id="a", attempts=1)
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock.spark.processing.workers", f"{tmp_path}/job.py:app", "rows", "1"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PENSTOCK_LOCAL_WORKER": url},
    )
    try:
        deadline = time.monotonic() + 60
        while app.sync.queue("rows").counts().failed < 1:
            assert worker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        _, printed = worker.communicate(timeout=60)
        app.sync.close()
    assert "row 1" not in printed
