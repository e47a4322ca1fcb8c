"""Data pipelines on Spark: tables in and out, and the history of queues as tables. Requires ``penstock[spark]``.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.archiving import Archived, archive
    from penstock.spark.executors import Fleet, FleetReport, fleet
    from penstock.spark.local import session
    from penstock.spark.operate import Cancelled, Retried, cancel, retry
    from penstock.spark.processing.entry import process
    from penstock.spark.processing.ledger import latest
    from penstock.spark.processing.result import Processed
    from penstock.spark.sink import WriteReport, write_report

__all__ = [
    "Archived",
    "Cancelled",
    "Fleet",
    "FleetReport",
    "Processed",
    "Retried",
    "WriteReport",
    "archive",
    "cancel",
    "fleet",
    "latest",
    "process",
    "retry",
    "session",
    "write_report",
]

_MODULES = {
    "Archived": "penstock.spark.archiving",
    "Cancelled": "penstock.spark.operate",
    "Fleet": "penstock.spark.executors",
    "FleetReport": "penstock.spark.executors",
    "Processed": "penstock.spark.processing.result",
    "Retried": "penstock.spark.operate",
    "WriteReport": "penstock.spark.sink",
    "archive": "penstock.spark.archiving",
    "cancel": "penstock.spark.operate",
    "fleet": "penstock.spark.executors",
    "latest": "penstock.spark.processing.ledger",
    "process": "penstock.spark.processing.entry",
    "retry": "penstock.spark.operate",
    "session": "penstock.spark.local",
    "write_report": "penstock.spark.sink",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        try:
            return getattr(import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "penstock":
                raise
            raise ModuleNotFoundError(
                f"penstock.spark needs {error.name}, which is not installed: pip install 'penstock[spark]'",
                name=error.name,
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
