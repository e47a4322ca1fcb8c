"""Command jobs: a shell command, its folder and its environment. Also the limits of a run in a sandbox."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.core.text import shown
from penstock.core.units import Duration, Size, byte_count, describe_size, milliseconds
from penstock.errors import InvalidInput, InvalidOption

COMMAND_TASK: Final = "penstock.command"
"""The task name of command jobs. The worker, not an app, maps it to a function."""

# The longest argument that Linux passes to a program.
_LONGEST: Final = 131_071


class CommandLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a command job.

    ``cwd`` is the folder to run in (empty: the worker's). ``env`` adds to the worker's environment.
    """

    command: str
    cwd: str = ""
    env: dict[str, str] = {}


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(CommandLine).decode

# An interpreter that has imported Penstock takes about 30 MiB; with less than this, no run could start.
_LEAST_MEMORY: Final = 64 * 1024**2


def check_command(line: CommandLine) -> CommandLine:
    """Return ``line``. Raise ``InvalidInput`` if a shell cannot run it."""
    if not line.command.strip():
        raise InvalidInput("the command is empty. Give a shell command, such as 'make report'.")
    if "\0" in line.command or len(line.command.encode("utf-8", "replace")) > _LONGEST:
        raise InvalidInput(
            "the command contains a NUL character or is longer than 128 KiB. Put it in a script and run that."
        )
    if "\0" in line.cwd:
        raise InvalidInput(f"the folder {shown(line.cwd, 300)} contains a NUL character.")
    for name, value in line.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidInput(
                f"the variable {shown(name)} cannot be set: its name is empty or contains '=', "
                "or it contains a NUL character."
            )
    return line


def encode_command(line: CommandLine) -> bytes:
    """Return the payload of a command job."""
    return _encode(line)


def decode_command(payload: bytes) -> CommandLine:
    """Return the command of a payload. Raise ``InvalidInput`` if it is not valid."""
    try:
        return check_command(_decode(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the payload is not a command: {error}. Enqueue it by `penstock enqueue`."
        ) from error


def command_text(payload: bytes) -> str:
    """Return the command of a payload for display, or the name of the task if the payload is not valid."""
    try:
        return _decode(payload).command
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return COMMAND_TASK


class SandboxLimits(msgspec.Struct, frozen=True):
    """The limits of one run; 0 means unlimited."""

    memory_bytes: int = 0
    cpu_ms: int = 0


def sandbox_limits(*, memory: Size | None, cpu_time: Duration | None) -> SandboxLimits:
    """Return the limits of a task; ``None`` means unlimited.

    Raises:
        InvalidOption: not a size, not a duration, or too little for any function to run.
    """
    memory_bytes = 0 if memory is None else byte_count(memory, what="memory")
    if 0 < memory_bytes < _LEAST_MEMORY:
        raise InvalidOption(
            f"memory must be at least {describe_size(_LEAST_MEMORY)}, got {shown(memory)}. "
            "The limit includes the Python process itself."
        )
    cpu_ms = 0 if cpu_time is None else milliseconds(cpu_time, what="cpu_time")
    if cpu_time is not None and cpu_ms == 0:
        raise InvalidOption(
            f"cpu_time must be greater than zero, got {shown(cpu_time)}. Use None for no limit."
        )
    return SandboxLimits(memory_bytes, cpu_ms)
