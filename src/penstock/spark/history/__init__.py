"""The history of queues as tables, exactly once: bronze (events), silver (jobs) and gold (measures over time).

``sync`` updates the tables, ``follow`` keeps them up to date, ``tables`` reads them, and ``report`` writes an HTML
page.
"""

from penstock.spark.history.html_page import report
from penstock.spark.history.syncing import SyncReport, Tables, follow, sync, tables

__all__ = ["SyncReport", "Tables", "follow", "report", "sync", "tables"]
