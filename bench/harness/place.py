"""Where things are: the benchmark's files, the project under test, and the cache for all that is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["ADAPTERS", "CACHE", "LIB", "PROJECT", "RESULTS"]

BENCH = Path(__file__).resolve().parent.parent
ADAPTERS = BENCH / "adapters"
LIB = BENCH / "lib"
PROJECT = Path(os.environ.get("PEERS_PROJECT") or BENCH.parent).resolve()
CACHE = Path(os.environ.get("PEERS_CACHE") or Path(tempfile.gettempdir()) / "penstock-bench").resolve()
RESULTS = CACHE / "results"
