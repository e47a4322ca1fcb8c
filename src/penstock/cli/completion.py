"""The queues and ids that a shell completes.

A completion that fails or takes too long returns nothing: the user only pressed a key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from penstock.client.app import App

# Spelled out, so that --help need not import the module that defines them.
STATES: Final = ("scheduled", "waiting", "blocked", "active", "completed", "failed", "cancelled")
_PATIENCE_S: Final = 1.0
_MOST_OFFERED: Final = 50
_MOST_SCANNED: Final = 1_000

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def completes_queues(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the queues whose names begin with ``incomplete``."""

    async def read(app: App) -> AsyncIterator[str]:
        for name in await app.queues():
            if name.startswith(incomplete):
                yield name

    return _first(ctx, read)


def is_queue(ctx: click.Context, name: str) -> bool:
    """Return whether the store has a queue ``name``; false if the store does not answer soon."""

    async def read(app: App) -> AsyncIterator[str]:
        if name in await app.queues():
            yield name

    return bool(_first(ctx, read))


def completes_ids(*states: str) -> Completer:
    """Return a completer of the ids of jobs in these states, or in any state."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        async def read(app: App) -> AsyncIterator[str]:
            for name in await app.queues():
                for state in states or STATES:
                    async for job in app.queue(name).list_jobs(state, limit=_MOST_SCANNED):
                        if job.id.startswith(incomplete) or _is_short_id(job.id, incomplete):
                            yield job.id
                        elif "/" in incomplete and job.ref.startswith(incomplete):
                            yield job.ref

        return _first(ctx, read)

    return complete


def _is_short_id(id: str, incomplete: str) -> bool:
    """Return whether ``incomplete`` is the end of the id, as tables show it. Some shells complete beginnings only."""
    from penstock.cli.jobview import SHORTEST

    return len(incomplete) >= SHORTEST and id.endswith(incomplete)


def _first(ctx: click.Context, read: Callable[[App], AsyncIterator[str]]) -> list[str]:
    """Return the first names that ``read`` yields in time."""
    from penstock.cli.connect import run_with_app
    from penstock.cli.parameters import Flags
    from penstock.cli.settings import Settings

    names: list[str] = []

    async def collect(app: App) -> None:
        async for name in read(app):
            names.append(name)
            if len(names) >= _MOST_OFFERED:
                return

    try:
        run_with_app(Settings(ctx.ensure_object(Flags)), collect, patience_s=_PATIENCE_S)
    except Exception:
        # The command itself will report the error.
        pass
    return names
