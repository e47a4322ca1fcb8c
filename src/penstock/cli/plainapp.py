"""An app without tasks on the configured store. The processes of a worker import it."""

from __future__ import annotations

from penstock.cli.connect import open_app
from penstock.cli.parameters import Flags
from penstock.cli.settings import Settings

app = open_app(Settings(Flags()))
