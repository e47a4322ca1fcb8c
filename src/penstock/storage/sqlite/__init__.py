"""The embedded engine: a SQLite file, or a database in memory."""

from __future__ import annotations

__all__: list[str] = []
