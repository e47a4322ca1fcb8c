"""The script ``penstock``: runs one command and exits with its code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import click


def main() -> NoReturn:
    """Run the command in ``sys.argv``, and exit."""
    try:
        sys.exit(_run_with_click(sys.argv[1:]))
    except KeyboardInterrupt:
        # While modules were imported, or while the command ended.
        sys.exit(_interrupted())


def _run_with_click(arguments: Sequence[str]) -> int:
    try:
        import click  # noqa: F401
    except ModuleNotFoundError:
        print(
            "penstock: the command line needs click, which is not installed: pip install 'penstock[cli]'",
            file=sys.stderr,
        )
        return 1
    return run(arguments)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Print an error as one line on stderr, or in full with ``--debug``."""
    from penstock.cli.output import guarded

    with guarded():
        # In a context of its own, so that what the command sets does not outlast it.
        return copy_context().run(_run, arguments)


def _run(arguments: Sequence[str]) -> int:
    import click

    from penstock.cli.commands import penstock
    from penstock.cli.output import ReaderGone
    from penstock.cli.parameters import Flags

    flags = Flags()
    try:
        # Without color, click would delete escape sequences that the user asked for.
        code = penstock.main(
            list(arguments), prog_name="penstock", standalone_mode=False, obj=flags, color=True
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (ReaderGone, BrokenPipeError):
        return _broken_pipe()
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _report(_in_one_line(error), debug=flags.debug)
        return error.exit_code
    except Exception as error:
        from penstock.cli.errors import explained

        message, code = explained(error)
        _report(message, debug=flags.debug)
        return int(code)


def _interrupted() -> int:
    """Say that Ctrl-C ended the command, and return the exit code for that."""
    print("penstock: interrupted", file=sys.stderr)
    return 130


def _broken_pipe() -> int:
    """Return the exit code for a reader that has gone, and keep Python from reporting the broken pipe."""
    from penstock.cli.errors import ExitCode

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return int(ExitCode.BROKEN_PIPE)


def _report(message: str, *, debug: bool) -> None:
    """Print the message of the current error, or its traceback."""
    if debug:
        import traceback

        traceback.print_exc()
    else:
        print(f"penstock: {message}", file=sys.stderr)


def _in_one_line(error: click.ClickException) -> str:
    from penstock.cli.output import in_one_line

    message = in_one_line(error.format_message())
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} (See: {context.command_path} --help)"
