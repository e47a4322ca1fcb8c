"""Staged jobs: a write enqueues them, releases them when it completes, and discards them when it fails.

A staged job is scheduled for a time that belongs to its write alone, later than all other times. So it needs neither a
state nor an index of its own, and maintenance never reaches it. These times stay below 2**48, the limit of records, and
below the year 10000, the limit of ``datetime``.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from penstock.core.job import STAGED_FROM_MS, NewJob
from penstock.errors import InvalidOption

_WRITES: Final = 2**46


@lru_cache(64)
def staged_at_ms(write_id: str) -> int:
    """Return the time that stands for a write. Two writes may share it, so readers also compare ``write_id``."""
    digest = blake2b(write_id.encode(), digest_size=8).digest()
    return STAGED_FROM_MS + int.from_bytes(digest, "big") % _WRITES


def check_staged(job: NewJob) -> None:
    """Raise ``InvalidOption`` if the job has options that staging excludes, or no ``write_id``."""
    extras = job.extras
    is_linked = job.after or (extras is not None and (extras.flow or extras.dependents or extras.repeats))
    if not job.write_id:
        raise _refused(job, "it has no write_id, so nothing could release it")
    if job.run_at_ms is not None:
        raise _refused(job, "it has a run_at; use a delay, which counts from the release")
    if job.dedup is not None:
        raise _refused(job, "it has a dedup key, which it would hold even if it were never released")
    if is_linked:
        raise _refused(job, "it belongs to a flow or a scheduler, which would wait for it")
    if job.conflict.mode == "redispatch":
        raise _refused(
            job, "on_conflict is redispatch, which would change a job before the write is complete"
        )


def _refused(job: NewJob, cause: str) -> InvalidOption:
    return InvalidOption(
        f"Job {job.id!r} cannot be staged: {cause}. Enqueue it without staging, or omit that."
    )
