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

_NAMES = {
    "archiving": ("Archived", "archive"),
    "executors": ("Fleet", "FleetReport", "fleet"),
    "local": ("session",),
    "operate": ("Cancelled", "Retried", "cancel", "retry"),
    "processing.entry": ("process",),
    "processing.ledger": ("latest",),
    "processing.result": ("Processed",),
    "sink": ("WriteReport", "write_report"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


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
