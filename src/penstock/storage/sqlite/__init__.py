"""The embedded engine: a SQLite file, or a database in memory.

Its SQL is in a file per subject under ``sql/``, each statement under a ``-- name:`` line.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Final

from penstock.core.job import STAGED_FROM_MS

RECORD_COLUMNS: Final = (
    "key", "id", "incarnation", "state", "priority", "place", "options", "o.value", "ttl_ms", "run_id", "write_id",
    "blocked_by", "runs", "failures", "stalls", "ready_at", "run_at", "enqueued_at", "expires_at", "claimed_at",
    "finished_at", "kept_until", "token", "settled_as", "worker", "lease_until", "cancelling", "failure", "result",
    "progress", "rerun", "annex", "binds", "held_until", "grip", "state",
)  # fmt: skip
"""The columns of ``records.Record``, in order. ``{record}`` in a statement stands for them."""

_DERIVED: Final = ("wake_at", "error_type")
"""Columns for indexes, from properties of a record."""

_FIXED: Final = ("key", "id", "o.value")
SAVED_COLUMNS: Final = (*dict.fromkeys(name for name in RECORD_COLUMNS if name not in _FIXED), *_DERIVED)
"""The columns that a change writes. ``{set_saved}`` stands for assignments to them."""

_LATER: Final = {
    **dict.fromkeys(("runs", "failures", "stalls", "claimed_at", "finished_at", "kept_until", "token"), "0"),
    **dict.fromkeys(("lease_until", "cancelling", "held_until", "wake_at"), "0"),
    **dict.fromkeys(("settled_as", "worker", "error_type"), "''"),
    **dict.fromkeys(("failure", "result", "progress", "rerun"), "NULL"),
}
"""Columns that a new job does not have yet, with their values in SQL. ``{later}`` and ``{later_values}`` stand for
them."""
NEW_COLUMNS: Final = tuple(name for name in SAVED_COLUMNS if name not in _LATER)
"""The other columns that a change writes. ``{new}`` stands for them."""

_TEXTS: Final = {
    "{record}": ", ".join(name if "." in name else f"j.{name}" for name in RECORD_COLUMNS),
    "{set_saved}": ", ".join(f"{name} = ?" for name in SAVED_COLUMNS),
    "{new}": ", ".join(NEW_COLUMNS),
    "{new_marks}": ", ".join("?" for _ in NEW_COLUMNS),
    "{later}": ", ".join(_LATER),
    "{later_values}": ", ".join(_LATER.values()),
    "{staged_from}": str(STAGED_FROM_MS),
}
_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def statements(subject: str) -> dict[str, str]:
    """Return the statements of ``sql/<subject>.sql`` by name."""
    text = (resources.files(__package__) / "sql" / f"{subject}.sql").read_text(encoding="utf-8")
    for mark, meaning in _TEXTS.items():
        text = text.replace(mark, meaning)
    _, *parts = _NAME.split(text)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def migrations() -> dict[int, str]:
    """Return the scripts that migrate a database to the next format, by the number of that format."""
    folder = resources.files(__package__) / "sql" / "migrations"
    return {int(file.name[:4]): file.read_text(encoding="utf-8") for file in folder.iterdir()}
