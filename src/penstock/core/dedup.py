"""Dedup keys: several jobs that are to be one, whatever their ids.

What the modes do to each other's jobs is in docs/verbs.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.names import check_dedup_key
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

DedupMode = Literal["simple", "throttle", "debounce"]


class Dedup(msgspec.Struct, frozen=True):
    """Under ``key``, which is a queue's own, at most one job goes in, by the rule of ``mode``.

    Make one by ``Dedup.simple``, ``Dedup.throttle`` or ``Dedup.debounce``, which check what they are given.
    ``ttl_ms`` counts from the enqueue that made the key's record; 0 is no bound. The store does not look at it for
    ``debounce``: there it is the delay of a job that has no other.
    """

    key: str
    mode: DedupMode = "simple"
    ttl_ms: int = 0

    @classmethod
    def simple(cls, key: str, ttl: Duration | None = None) -> Dedup:
        """While the earlier job has not ended, but at most ``ttl`` long, a new one is a duplicate of it."""
        return cls(check_dedup_key(key), "simple", 0 if ttl is None else milliseconds(ttl, what="ttl"))

    @classmethod
    def throttle(cls, key: str, ttl: Duration) -> Dedup:
        """One job per ``ttl``, counted from its enqueue, whatever becomes of it."""
        return cls(check_dedup_key(key), "throttle", _some(ttl, "ttl", "Use Dedup.simple for no window."))

    @classmethod
    def debounce(cls, key: str, delay: Duration | None = None) -> Dedup:
        """A new job takes the place of an earlier one that has not begun, so that only the newest of a burst runs.

        ``delay`` is how long each of them waits for a newer one; without it, the job's own delay says so.
        """
        return cls(check_dedup_key(key), "debounce", 0 if delay is None else milliseconds(delay))


def _some(value: Duration, what: str, remedy: str) -> int:
    ms = milliseconds(value, what=what)
    if ms < 1:
        raise InvalidOption(f"{what}={shown(value)} is over at once. {remedy}")
    return ms
