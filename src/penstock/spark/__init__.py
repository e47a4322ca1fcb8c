"""The data pipeline: a table in, a table out, and the history of the queues as tables. Needs ``penstock[spark]``.

Nothing is imported until it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.report import WriteReport, write_report
    from penstock.spark.local import session

__all__ = ["WriteReport", "session", "write_report"]

_HOMES = {
    "WriteReport": "penstock.spark.report",
    "session": "penstock.spark.local",
    "write_report": "penstock.spark.report",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
