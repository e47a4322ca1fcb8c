"""An app of the project's own."""

from __future__ import annotations

from penstock import App

app = App("memory://before")
