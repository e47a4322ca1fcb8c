"""``manage.py penstock …``: the commands of Penstock's command line, for the app of the settings."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from penstock.integrations.django.configuration import PROJECT


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Runs ``python -m penstock`` with Django set up."""

    help = "Run a command of Penstock: worker, status, list, show, retry … See `penstock --help`."

    # Others may import tasks, which need valid settings.
    requires_system_checks = ("penstock",)
    _given: Sequence[str] | None = None

    def add_arguments(self, parser: CommandParser) -> None:
        """Take all words, for ``call_command``."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep the words from Django's own parser, except the options that choose the settings."""
        ours, given = argparse.ArgumentParser(add_help=False, allow_abbrev=False), argv[2:]
        ours.add_argument("--settings")
        ours.add_argument("--pythonpath")
        chosen, self._given = ours.parse_known_args(given)
        options = [f"--{name}={value}" for name, value in vars(chosen).items() if value is not None]
        super().run_from_argv([*argv[:2], *options])

    def handle(self, *args: str, arguments: Sequence[str] = (), **options: Any) -> None:
        """Run the command, which ends with ``SystemExit``."""
        os.environ.setdefault("PENSTOCK_APP", f"{PROJECT}:app")
        before = sys.argv
        sys.argv = ["penstock", *(arguments if self._given is None else self._given)]
        try:
            runpy.run_module("penstock", run_name="__main__")
        finally:
            sys.argv = before
