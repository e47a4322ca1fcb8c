"""The data pipeline: a table in, a table out, and the history of the queues as tables. Needs ``penstock[spark]``.

Nothing is imported until it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.executors import Fleet, FleetReport, fleet
    from penstock.spark.local import session
    from penstock.spark.report import WriteReport, write_report
    from penstock.spark.tables.entry import Processed, process
    from penstock.spark.tables.ledger import latest

__all__ = [
    "Fleet",
    "FleetReport",
    "Processed",
    "WriteReport",
    "fleet",
    "latest",
    "process",
    "session",
    "write_report",
]

_HOMES = {
    "Fleet": "penstock.spark.executors",
    "FleetReport": "penstock.spark.executors",
    "Processed": "penstock.spark.tables.entry",
    "WriteReport": "penstock.spark.report",
    "fleet": "penstock.spark.executors",
    "latest": "penstock.spark.tables.ledger",
    "process": "penstock.spark.tables.entry",
    "session": "penstock.spark.local",
    "write_report": "penstock.spark.report",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
