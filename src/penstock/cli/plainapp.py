"""An app without tasks on the store of the settings, where the processes of a worker find it: by import."""

from __future__ import annotations

from penstock.cli.connect import open_app
from penstock.cli.parameters import Flags
from penstock.cli.settings import Settings

app = open_app(Settings(Flags()))
