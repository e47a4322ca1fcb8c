"""Django's own tests of backends for ``django.tasks``. ``make test-django`` fetches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("django.tasks")

SOURCE = os.environ.get("DJANGO_SOURCE")


@pytest.mark.skipif(SOURCE is None, reason="DJANGO_SOURCE is not set: run `make test-django`")
@pytest.mark.timeout(300)
def test_our_backend_passes_the_tests_of_django() -> None:
    from tests.integrations.django.upstream import NOT_OURS

    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.integrations.django.upstream",
            str(Path(str(SOURCE), "tests", "tasks")),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["failed"] == [], run.stderr
    assert told["skipped"] == []
    assert told["left_out"] == sorted(NOT_OURS), "a test that is left out is no longer there"
    assert told["ran"] > 60
