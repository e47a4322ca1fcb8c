"""``penstock completion``: commands and options completed by the shell."""

from __future__ import annotations

import click

from penstock.cli.parameters import command

__all__ = ["completion"]

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
