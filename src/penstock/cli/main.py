"""The script ``penstock``: runs one command and ends with its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import click

__all__ = ["main", "run"]


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
    """Run one command; its exit code. What goes wrong is said on stderr, in one line unless ``--debug`` is given."""
    import click

    from penstock.cli.commands import penstock
    from penstock.cli.flags import Flags

    flags = Flags()
    try:
        code = penstock.main(list(arguments), prog_name="penstock", standalone_mode=False, obj=flags)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # Whoever read our output, `head` say, has seen enough. Python must not complain at its exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, click.Abort):
        print("penstock: interrupted", file=sys.stderr)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        if flags.debug:
            raise
        print(f"penstock: {_in_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if flags.debug:
            raise
        from penstock.cli.errors import explained

        message, code = explained(error)
        print(f"penstock: {message}", file=sys.stderr)
        return int(code)


def _in_one_line(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} (See: {context.command_path} --help)"
