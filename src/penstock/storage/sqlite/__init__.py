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
    "j.key, j.id, j.incarnation, j.state, j.priority, j.place, j.options, o.value, j.ttl_ms, j.run_id,"
    " j.write_id, j.blocked_by, j.runs, j.failures, j.stalls, j.ready_at, j.run_at, j.enqueued_at, j.expires_at,"
    " j.claimed_at, j.finished_at, j.kept_until, j.token, j.settled_as, j.worker, j.lease_until, j.cancelling,"
    " j.failure, j.result, j.progress, j.rerun, j.annex, j.binds, j.held_until, j.grip, j.state"
)
"""The columns of ``records.Record``, in order. ``{record}`` in a statement stands for them."""

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def statements(subject: str) -> dict[str, str]:
    """Return the statements of ``sql/<subject>.sql`` by name."""
    text = (resources.files(__package__) / "sql" / f"{subject}.sql").read_text(encoding="utf-8")
    text = text.replace("{record}", RECORD_COLUMNS).replace("{staged_from}", str(STAGED_FROM_MS))
    _, *parts = _NAME.split(text)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def migrations() -> dict[int, str]:
    """Return the scripts that migrate a database to the next format, by the number of that format."""
    folder = resources.files(__package__) / "sql" / "migrations"
    return {int(file.name[:4]): file.read_text(encoding="utf-8") for file in folder.iterdir()}
