"""What a shell completes from the store: queues and ids. Nothing at all rather than late, or with an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.jobview import SHORTEST
from penstock.cli.parameters import Flags, command

if TYPE_CHECKING:
    from penstock.client.app import App


_PATIENCE_S: Final = 1.0
_MOST: Final = 50
_MOST_LOOKED_AT: Final = 1_000

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def queue_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The queues that begin with what was typed."""

    async def read(app: App) -> AsyncIterator[str]:
        for name in await app.queues():
            if name.startswith(incomplete):
                yield name

    return _found(ctx, read)


def ids_in(*states: str) -> Completer:
    """A completer of the ids of jobs in these states."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        async def read(app: App) -> AsyncIterator[str]:
            for name in await app.queues():
                for state in states:
                    async for job in app.queue(name).list_jobs(state, limit=_MOST_LOOKED_AT):
                        if job.id.startswith(incomplete) or _ends(job.id, incomplete):
                            yield job.id
                        elif "/" in incomplete and job.ref.startswith(incomplete):
                            yield job.ref

        return _found(ctx, read)

    return complete


def _ends(id: str, incomplete: str) -> bool:
    """Return true for the end of an id, as tables show it. Shells that only complete beginnings leave it out."""
    return len(incomplete) >= SHORTEST and id.endswith(incomplete)


def _found(ctx: click.Context, read: Callable[[App], AsyncIterator[str]]) -> list[str]:
    from penstock.cli.connect import run_with_app
    from penstock.cli.settings import Settings

    found: list[str] = []

    async def look(app: App) -> None:
        async for name in read(app):
            found.append(name)
            if len(found) >= _MOST:
                return

    try:
        run_with_app(Settings(ctx.find_object(Flags) or Flags()), look, patience_s=_PATIENCE_S)
    except Exception:
        # Whoever presses a key wants no story of why there is nothing: the command itself will tell it.
        pass
    return found


# ``penstock completion``: commands and options completed by the shell.


_INSTALL = {
    "bash": '~/.bashrc:  eval "$(penstock completion bash)"',
    "zsh": '~/.zshrc, behind compinit:  eval "$(penstock completion zsh)"',
    "fish": "~/.config/fish/completions/penstock.fish:  penstock completion fish | source",
}


@command("completion", epilog="\b\nTo have it in every shell, add a line to\n" + "\n".join(_INSTALL.values()))
@click.argument("shell", metavar="SHELL", type=click.Choice(sorted(_INSTALL)))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, queues and ids in SHELL: bash, zsh or fish.

    \b
      eval "$(penstock completion bash)"      here and now
    """
    from click.shell_completion import get_completion_class

    from penstock.cli.commands import penstock

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(penstock, {}, "penstock", "_PENSTOCK_COMPLETE").source())
