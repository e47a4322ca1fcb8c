"""Where things are: the benchmark's files, the project under test, and the cache for all that is written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["ADAPTERS", "BENCH", "CACHE", "LIB", "PROJECT", "RESULTS", "save"]

BENCH = Path(__file__).resolve().parent.parent
ADAPTERS = BENCH / "adapters"
LIB = BENCH / "lib"
PROJECT = Path(os.environ.get("PEERS_PROJECT") or BENCH.parent).resolve()
CACHE = Path(os.environ.get("PEERS_CACHE") or Path(tempfile.gettempdir()) / "penstock-bench").resolve()
RESULTS = CACHE / "results"


def save(kind: str, run: dict[str, Any], text: str, folder: Path) -> Path:
    """Write the tables of a run and, beside them, every sample as JSON. Return the path of the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{run['run']}.md"
    path.write_text(text + "\n")
    path.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    return path
