"""A history: four Delta tables in one folder, on a disk or in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.errors import InvalidOption
from penstock.spark.cells import arrow_schema
from penstock.spark.delta import Folder, Table, open_folder
from penstock.spark.history.folding import ARROW
from penstock.spark.history.measures import CAUSES, GOLD
from penstock.spark.publishing import refuse_pattern
from penstock.spark.schemas import EVENTS

_TABLES: Final = {"bronze", "silver", "gold", "causes"}
_BEFORE_DELTA: Final = "_history.json"


class History:
    """The tables of a history. ``consumer`` is the name of the consumer that holds back the trimming of logs."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.bronze = Table(
            folder.inside("bronze"),
            arrow_schema(EVENTS),
            ranged="at",
            stats=("queue", "epoch", "seq", "type", "enqueued_at"),
        )
        self.silver = Table(
            folder.inside("silver"), ARROW, ranged="enqueued_at", stats=("queue", "state", "last_seen_at")
        )
        self.gold = Table(folder.inside("gold"), GOLD, ranged="at", stats=("grain", "dimension", "queue"))
        self.causes = Table(folder.inside("causes"), CAUSES, ranged="at", stats=("grain", "queue"))

    @property
    def consumer(self) -> str:
        table = self.bronze.load().table
        assert table is not None
        return f"history-{str(table.metadata().id).replace('-', '')[:12]}"


def open_history(path: str | Path, options: Mapping[str, str] | None = None, *, create: bool) -> History:
    """Return the history at a path, or at a URL of an object store.

    Raises:
        InvalidOption: the folder is not a history, or the object store is not safe for several writers.
    """
    folder = open_folder(path, options)
    refuse_pattern(folder.root)
    history = History(folder)
    names = set(folder.names())
    if _BEFORE_DELTA in names:
        raise InvalidOption(
            f"{folder.root} was written by an earlier version of Penstock, before history was kept in Delta tables. "
            "Sync into a new folder. It starts with the events that the store still has."
        )
    if (names and "bronze" not in names) or (not names and not create):
        raise InvalidOption(
            f"{folder.root} is not a history: it has no table bronze. Use a folder that history.sync has written, or "
            "an empty folder to start one."
        )
    if create:
        for table in (history.bronze, history.silver, history.gold, history.causes):
            table.create()
    elif history.bronze.load().table is None:
        raise InvalidOption(
            f"{folder.root}/bronze is not a Delta table. Use a folder that history.sync has written."
        )
    return history
