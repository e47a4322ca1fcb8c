"""Ends of a run's jobs, from the store to rows of the ledger. They are held for it until they are written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from penstock.core.annex import EMPTY_ANNEX
from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.core.usage import MILLION
from penstock.spark.arrow import json_text
from penstock.spark.tables.snapshot import fingerprint_in, former_fingerprint

__all__ = ["KEY_HEADER", "has_begun", "rows_of"]

KEY_HEADER: Final = "penstock-key"
_BUDGET_EXCEEDED: Final = "BudgetExceeded"

_TIME: Final = pa.timestamp("us", tz="UTC")
ARROW: Final = pa.schema(
    [
        ("state", pa.string()),
        ("result", pa.string()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("runs", pa.int32()),
        ("failures", pa.int32()),
        ("cost", pa.float64()),
        ("usage", pa.map_(pa.string(), pa.float64())),
        ("run_ms", pa.int64()),
        ("enqueued_at", _TIME),
        ("finished_at", _TIME),
        ("task", pa.string()),
        ("task_version", pa.string()),
        ("run_id", pa.string()),
        ("job_id", pa.string()),
        ("incarnation", pa.int64()),
        ("fingerprint", pa.string()),
        ("commit", pa.int64()),
        ("key_json", pa.string()),
    ]
)


def has_begun(job: Job) -> bool:
    """Whether a finished job is worth a row: not if the budget of its run was spent before it began."""
    return job.failure is None or job.failure.type != _BUDGET_EXCEEDED


def rows_of(jobs: Sequence[Job], *, commit: int, cost_name: str) -> pa.Table:
    """Rows for ``Ledger.append``."""
    return pa.Table.from_pylist([_row(job, commit, cost_name) for job in jobs], schema=ARROW)


def _row(job: Job, commit: int, cost_name: str) -> dict[str, Any]:
    annex = job.annex or EMPTY_ANNEX
    used = {name: micros / MILLION for name, micros in (annex.usage or {}).items()}
    # A job that has completed keeps the failure of an earlier run.
    failure = None if job.state is State.COMPLETED else job.failure
    return {
        "state": str(job.state),
        "result": None if job.result is None else json_text(job.result),
        "error_type": failure and failure.type,
        "error": failure and failure.message,
        "runs": job.runs,
        "failures": job.failures,
        "cost": used.get(cost_name),
        "usage": list(used.items()),
        "run_ms": max(job.finished_at_ms - job.claimed_at_ms, 0) if job.claimed_at_ms else None,
        "enqueued_at": job.enqueued_at_ms * 1000,
        "finished_at": job.finished_at_ms * 1000,
        "task": job.options.task,
        "task_version": job.options.version,
        "run_id": job.run_id,
        "job_id": job.id,
        "incarnation": job.incarnation,
        "fingerprint": _fingerprint(job),
        "commit": commit,
        "key_json": (annex.headers or {}).get(KEY_HEADER),
    }


def _fingerprint(job: Job) -> str:
    """The job has it from the row it was made of. An earlier version, or somebody else, may have put the job in."""
    return fingerprint_in(job.write_id) or former_fingerprint(job.payload, job.options.version)
