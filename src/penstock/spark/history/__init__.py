"""The history of queues as tables that grow exactly once: bronze (events), silver (jobs), gold (what happened when).

``sync`` brings them up to date, ``follow`` keeps them so, ``tables`` reads them, ``report`` makes a page of them.
"""

from penstock.spark.history.paging import report
from penstock.spark.history.sync import SyncReport, Tables, follow, sync, tables

__all__ = ["SyncReport", "Tables", "follow", "report", "sync", "tables"]
