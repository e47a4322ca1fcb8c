"""The script ``penstock``: runs one command and ends with its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import click


def main() -> NoReturn:
    """What the script calls. Ends the process."""
    try:
        import click  # noqa: F401
    except ModuleNotFoundError:
        print(
            "penstock: the command line needs click, which is not installed: pip install 'penstock[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors are one line on stderr, unless ``--debug`` is given."""
    from penstock.cli.output import guarded

    with guarded():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    import click

    from penstock.cli.commands import penstock
    from penstock.cli.output import ReaderGone
    from penstock.cli.parameters import Flags

    flags = Flags()
    try:
        # With color, click hands text on as it is. Without, it would delete escape sequences that are to be seen.
        code = penstock.main(
            list(arguments), prog_name="penstock", standalone_mode=False, obj=flags, color=True
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (ReaderGone, BrokenPipeError):
        return _reader_is_gone()
    except (KeyboardInterrupt, click.Abort):
        print("penstock: interrupted", file=sys.stderr)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _tell(_in_one_line(error), debug=flags.debug)
        return error.exit_code
    except Exception as error:
        from penstock.cli.errors import explained

        message, code = explained(error)
        _tell(message, debug=flags.debug)
        return int(code)


def _reader_is_gone() -> int:
    """Return the exit code of a program that SIGPIPE ended, as `head` ends others. Python must not complain either."""
    from penstock.cli.errors import ExitCode

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return int(ExitCode.BROKEN_PIPE)


def _tell(message: str, *, debug: bool) -> None:
    """Print the message of the error that is being handled, or its traceback."""
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
