"""The file in which handlers tell the time: records of 32 bytes, appended by every worker process."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["Tick", "Ticks"]

RECORD = struct.Struct("<qqqq")


class Tick(NamedTuple):
    pid: int
    jobs: int
    """Handler calls since the process's record before this one."""
    at_ns: int
    """CLOCK_MONOTONIC."""
    value_ns: int
    """CPU time of the process; in the workload `wake`, the time since the job was enqueued."""


class Ticks:
    """A reader of the file; `total` reads on from where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._offset = 0

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
        self._seen = self._offset = 0

    def read(self, offset: int = 0) -> list[Tick]:
        """The whole records from an offset on."""
        try:
            with open(self.path, "rb") as f:
                f.seek(offset)
                data = f.read()
        except FileNotFoundError:
            return []
        whole = len(data) // RECORD.size * RECORD.size
        return [Tick(*fields) for fields in RECORD.iter_unpack(data[:whole])]

    def total(self) -> int:
        """How many handler calls there were since `clear`."""
        new = self.read(self._offset)
        self._offset += len(new) * RECORD.size
        self._seen += sum(t.jobs for t in new)
        return self._seen
