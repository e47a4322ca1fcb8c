"""The history of queues as tables that grow exactly once: bronze (events), silver (jobs), gold (what happened when).

``sync`` brings them up to date, ``follow`` keeps them so, ``tables`` reads them, ``report`` makes a page of them.
"""

from penstock.spark.history.paging import report
from penstock.spark.history.syncing import SyncReport, follow, sync
from penstock.spark.history.views import Tables, tables

__all__ = ["SyncReport", "Tables", "follow", "report", "sync", "tables"]
