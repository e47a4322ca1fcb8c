"""What is to be there after the machine has lost its power."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["make_durable"]


def make_durable(path: Path) -> None:
    """The content of a file; of a folder, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
