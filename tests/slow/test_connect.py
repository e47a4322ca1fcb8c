"""All of it by Spark Connect: no context, no gateway, plans that are looked at when they are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow.local_processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_write_read_process_and_archive_work_by_spark_connect(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    client = subprocess.run(
        [sys.executable, "-m", "tests.slow.connect_client", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PENSTOCK_URL": f"sqlite:///{tmp_path}/connect.db", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert client.returncode == 0, client.stderr[-6000:]
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "classic": False,
        "accepted": 20,
        "read": list(range(20)),
        "done": [[0, 10], [10, 5]],
        "cubes": [[n, n**3] for n in range(15)],
        "archived": [15, 15],
        "cancelled": 20,
        "commanded": [0, 5],
    }
