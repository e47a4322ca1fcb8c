"""What a run in a sandbox may use: the options ``memory`` and ``cpu_time`` of a task, in bytes and milliseconds."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.core.display import shown
from penstock.core.duration import Duration, milliseconds
from penstock.core.size import Size, byte_count, describe_size
from penstock.errors import InvalidOption

__all__ = ["SandboxLimits", "sandbox_limits"]

# An interpreter with Penstock in it takes some 30 MiB; below this a run would fail before it begins.
_LEAST_MEMORY: Final = 64 * 1024**2


class SandboxLimits(msgspec.Struct, frozen=True):
    """The limits of one run; 0 is no limit."""

    memory_bytes: int = 0
    cpu_ms: int = 0


def sandbox_limits(*, memory: Size | None, cpu_time: Duration | None) -> SandboxLimits:
    """The limits a task asks for; ``None`` is no limit.

    Raises:
        InvalidOption: no size, no duration, or too little for any function to run with.
    """
    memory_bytes = 0 if memory is None else byte_count(memory, what="memory")
    if 0 < memory_bytes < _LEAST_MEMORY:
        raise InvalidOption(
            f"memory={shown(memory)} is too little for a Python process, which the limit includes. "
            f"Give at least {describe_size(_LEAST_MEMORY)}."
        )
    cpu_ms = 0 if cpu_time is None else milliseconds(cpu_time, what="cpu_time")
    if cpu_time is not None and cpu_ms == 0:
        raise InvalidOption(f"cpu_time={shown(cpu_time)} leaves a function no time. Give None for no limit.")
    return SandboxLimits(memory_bytes, cpu_ms)
