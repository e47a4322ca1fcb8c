"""What Java and Spark say on stderr when they start, whatever one sets: kept from people who did not ask for it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["without_java_noise"]

_NOISE: Final = (
    b"WARNING: Using incubator modules",
    b"Setting default log level to",
    b"To adjust logging level use",
    b"Picked up JAVA_TOOL_OPTIONS",
)


@contextmanager
def without_java_noise() -> Iterator[None]:
    """Processes that are started within the block say the rest of it here, for as long as they run."""
    sys.stderr.flush()
    ours = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    threading.Thread(target=_pass_on, args=(reading, os.dup(ours)), name="penstock-java", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)


def _pass_on(reading: int, writing: int) -> None:
    with os.fdopen(reading, "rb") as said, os.fdopen(writing, "wb", buffering=0) as shown:
        for line in said:
            if not line.startswith(_NOISE):
                shown.write(line)
