"""Staged jobs: put in by a write that is yet to be whole, and released or removed with it.

A staged job is scheduled for an instant that is beyond all others and belongs to its write alone. So it needs no state
and no index of its own, and nothing that time brings ever reaches it. Instants stay below 2**48, which is what
records have room for, and below the year 10000, which is what ``datetime`` has.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.core.job import NewJob

__all__ = ["STAGED_FROM_MS", "check_staged", "staged_at_ms"]

STAGED_FROM_MS: Final = 2**47
"""The year 6429: the first instant that no user may name."""

_WRITES: Final = 2**46


@lru_cache(64)
def staged_at_ms(write_id: str) -> int:
    """The instant of a write. Two writes may share one, so whoever walks it looks at ``write_id`` too."""
    digest = blake2b(write_id.encode(), digest_size=8).digest()
    return STAGED_FROM_MS + int.from_bytes(digest, "big") % _WRITES


def check_staged(job: NewJob) -> None:
    """Refuse what does not go together with staging.

    Raises:
        InvalidOption: no ``write_id``; an instant, a dedup key, a flow or a redispatch.
    """
    annex = job.annex
    is_tied = job.after or (annex is not None and (annex.flow or annex.dependents or annex.repeats))
    if not job.write_id:
        raise _refused(job, "it has no write_id, so nothing could release it")
    if job.run_at_ms is not None:
        raise _refused(job, "it has a run_at; give it a delay, which counts from the release")
    if job.dedup is not None:
        raise _refused(job, "it has a dedup key, and nobody knows whether it will ever stand for it")
    if is_tied:
        raise _refused(job, "it belongs to a flow or a scheduler, which would wait for it")
    if job.conflict.mode == "redispatch":
        raise _refused(job, "on_conflict is redispatch, which would change a job before the write is whole")


def _refused(job: NewJob, cause: str) -> InvalidOption:
    return InvalidOption(
        f"Job {job.id!r} cannot be staged: {cause}. Enqueue it without staging, or leave that out."
    )
