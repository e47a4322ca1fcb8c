"""The HTML page of a history: one self-contained file without external requests."""

from __future__ import annotations

import html
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.errors import InvalidOption
from penstock.spark.event_ranges import instant_ms
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.figures import figures
from penstock.spark.history.folder import open_history
from penstock.spark.history.state import BronzeState

_PARTS: Final = Path(__file__).with_name("page")
_END_MS: Final = 1 << 60


def report(
    path: str | Path,
    out: str | Path,
    *,
    since: str | datetime | None = None,
    until: str | datetime | None = None,
    title: str = "Queues",
    storage_options: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of a history as of its last sync, and return its path. This needs neither Spark nor the store.

    ``since`` and ``until`` limit the time range. They are datetimes or ISO 8601 texts (UTC if they have no zone). An
    existing page at ``out`` is replaced atomically.

    Raises:
        InvalidOption: the folder is not a history, has no gold yet, or a time is invalid.
    """
    history = open_history(path, storage_options, create=False)
    gold = history.gold.load()
    if not gold.number:
        raise InvalidOption(
            f"{history.folder.root} has no gold yet. Run history.sync first (with upto='gold', the default)."
        )
    data = figures(
        history,
        since_ms=0 if since is None else instant_ms(since, what="since"),
        until_ms=_END_MS if until is None else instant_ms(until, what="until"),
    )
    assert gold.table is not None
    synced = gold.table.history(1)[0]["timestamp"]
    data |= {"synced": synced, "title": title, **_losses(bronze_state(history, history.bronze.load()))}
    target = Path(out)
    draft = target.with_name(f".{target.name}.draft")
    draft.write_text(_render(data, title), encoding="utf-8")
    draft.replace(target)
    return target


def _losses(bronze: BronzeState) -> dict[str, Any]:
    return {
        "losses": [[loss.queue, loss.first, loss.last] for loss in bronze.losses],
        "changes": [[change.queue, change.common + 1, change.read] for change in bronze.changes],
    }


def _script() -> str:
    """Return both modules as one script, because a single file cannot import modules."""
    charts, page = ((_PARTS / name).read_text(encoding="utf-8") for name in ("charts.js", "page.js"))
    return charts.replace("\nexport ", "\n") + page[page.index("\n") :]


def _render(data: dict[str, Any], title: str) -> str:
    # The data must not close its script element.
    packed = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": (_PARTS / "page.css").read_text(encoding="utf-8"),
        "script": _script(),
        "data": packed,
    }
    page = (_PARTS / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"{{{{ {name} }}}}", part, 1)
    return page
