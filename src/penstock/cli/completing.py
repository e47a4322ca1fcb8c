"""What a shell completes from the store: queues and ids. Nothing at all rather than late, or with an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.flags import Flags

if TYPE_CHECKING:
    from penstock.app import App

__all__ = ["ids_in", "queue_names"]

_PATIENCE_S: Final = 1.0
_MOST: Final = 50
_MOST_LOOKED_AT: Final = 1_000

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def queue_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The queues that begin with what was typed."""

    async def read(app: App) -> AsyncIterator[str]:
        for name in await app.queues():
            yield name

    return _found(ctx, incomplete, read)


def ids_in(*states: str) -> Completer:
    """A completer of the ids of jobs in these states."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        async def read(app: App) -> AsyncIterator[str]:
            for name in await app.queues():
                for state in states:
                    async for job in app.queue(name).list_jobs(state, limit=_MOST_LOOKED_AT):
                        yield job.id

        return _found(ctx, incomplete, read)

    return complete


def _found(ctx: click.Context, incomplete: str, read: Callable[[App], AsyncIterator[str]]) -> list[str]:
    from penstock.cli.connect import run_with_app
    from penstock.cli.settings import Settings

    found: list[str] = []

    async def look(app: App) -> None:
        async for name in read(app):
            if name.startswith(incomplete):
                found.append(name)
            if len(found) >= _MOST:
                return

    try:
        run_with_app(Settings(ctx.find_object(Flags) or Flags()), look, patience_s=_PATIENCE_S)
    except Exception:
        # Whoever presses a key wants no story of why there is nothing: the command itself will tell it.
        pass
    return found
