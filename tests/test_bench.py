"""The benchmarks are not measured here, but they load: they use inner modules of Penstock, which move."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
MODULES = sorted(path.stem for path in (BENCH / "harness").glob("*.py") if path.stem != "__init__")


@pytest.mark.timeout(120)
def test_every_module_of_the_harness_loads() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCH), *sys.path])}
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(f'harness.{name}')"
    command = [sys.executable, "-c", code, *MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
