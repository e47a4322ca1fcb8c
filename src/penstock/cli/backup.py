"""``penstock backup`` and ``penstock restore``: copies of a store in a file."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.connect import is_local, open_app, refuse_missing_file
from penstock.cli.errors import WrongState
from penstock.cli.flags import Flags
from penstock.cli.parameters import command, yes_option
from penstock.cli.queues import ask
from penstock.cli.settings import Settings

__all__ = ["backup", "restore"]

_file_argument = click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))


@command("backup")
@_file_argument
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.pass_obj
def backup(flags: Flags, /, *, file: str, force: bool) -> None:
    """Write a copy of the store to FILE. Workers and producers go on meanwhile.

    \b
      penstock backup "backups/$(date +%F).db"

    The copy is consistent and holds all namespaces. Only its owner may read it. For stores in a SQLite file; a server
    makes its own backups.
    """
    from penstock.storage.sqlite.backup import backup as write

    url = open_app(Settings(flags)).url
    refuse_missing_file(url)
    if Path(file).exists() and not force and is_local(url):
        raise WrongState(f"{file} exists. Choose another name, or add --force.")
    write(url, file, overwrite=force)
    click.echo(f"the backup is in {file}")


@command("restore")
@_file_argument
@yes_option
@click.pass_obj
def restore(flags: Flags, /, *, file: str, yes: bool) -> None:
    """Replace the store by FILE, which `penstock backup` has written. Stop all workers first. Asks first.

    What happened since the backup is lost: jobs that ended since may run again. Readers of events notice that history
    has changed, and no fencing token comes back.
    """
    from penstock.storage.sqlite.backup import restore as put_back

    url = open_app(Settings(flags)).url
    if is_local(url):
        question = f"Replace the store {url} by {file}? What happened since that backup is lost."
        ask(question, yes=yes, nothing="nothing was replaced")
    put_back(url, file)
    click.echo(f"the store {url} is restored from {file}")
