"""Dedup keys: at most one of several jobs runs, whatever their ids. docs/verbs.md describes the modes."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.names import check_dedup_key
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

DedupMode = Literal["simple", "throttle", "debounce"]


class Dedup(msgspec.Struct, frozen=True):
    """A key of one queue, and the rule (``mode``) for jobs that share it.

    ``Dedup.simple``, ``Dedup.throttle`` and ``Dedup.debounce`` make one and check their arguments. ``ttl_ms``
    counts from the enqueue that took the key; 0 means no limit. For ``debounce`` the store ignores it: it is the
    delay of a job that has no delay of its own.
    """

    key: str
    mode: DedupMode = "simple"
    ttl_ms: int = 0

    @classmethod
    def simple(cls, key: str, ttl: Duration | None = None) -> Dedup:
        """Treat a job as a duplicate while an earlier one is open, for up to ``ttl``."""
        return cls(check_dedup_key(key), "simple", 0 if ttl is None else milliseconds(ttl, what="ttl"))

    @classmethod
    def throttle(cls, key: str, ttl: Duration) -> Dedup:
        """Accept one job per ``ttl``, counted from its enqueue, whatever its outcome."""
        return cls(
            check_dedup_key(key), "throttle", _positive_ms(ttl, "ttl", "Use Dedup.simple for no window.")
        )

    @classmethod
    def debounce(cls, key: str, delay: Duration | None = None) -> Dedup:
        """Replace an earlier job that has not started, so that only the newest of a burst runs.

        ``delay`` is how long each job waits for a newer one; the default is the job's own delay.
        """
        return cls(check_dedup_key(key), "debounce", 0 if delay is None else milliseconds(delay))


def _positive_ms(value: Duration, what: str, remedy: str) -> int:
    ms = milliseconds(value, what=what)
    if ms < 1:
        raise InvalidOption(f"{what} must be at least 1 ms, got {shown(value)}. {remedy}")
    return ms
