"""The bounds that every engine keeps. Times are in milliseconds.

``valkey.library`` renders them into Lua as ``BOUNDS.<NAME>``.
"""

from __future__ import annotations

from typing import Final

from penstock.core.job import DAY_MS, HOUR_MS

MINUTE_MS: Final = 60_000
DAY_MINUTES: Final = DAY_MS // MINUTE_MS
"""The number of minutes for which a queue keeps metrics."""

# Kept

REPLAY_KEPT_MS: Final = MINUTE_MS
"""The time for which a call can be repeated with its ticket."""
NEWS_KEPT_MS: Final = MINUTE_MS
"""The time for which the end of a job waits for its listener."""
WORKERS_KEPT_MS: Final = HOUR_MS
"""The time for which a worker is listed after its last heartbeat."""
USAGE_KEPT_MS: Final = 30 * DAY_MS
"""The time for which a sum of usage is kept after it last grew."""
DAMAGED_KEPT_MS: Final = 30 * DAY_MS
"""The least time for which a job is kept whose record cannot be read."""
LOG_LINES_KEPT: Final = 1000
"""The newest log lines of a job."""
SIGNALS_KEPT: Final = 100
"""The signals of a job that it has not taken yet."""

# Work of one call

PROMOTED_PER_CLAIM: Final = 1000
"""The due jobs that a claim promotes. Sweeps promote the rest."""
GROUPS_PER_CLAIM: Final = 100
"""The groups that a claim checks for room."""
ADMITTED_AT_ONCE: Final = 1000
"""The blocked members of a group that are admitted together."""

# Queue time (docs/verbs.md, *Time*)

CLOCK_GAP_MS: Final = 10_000
"""A time without calls that counts as a gap. Workers sweep every 5 s."""
CLOCK_TERM_MS: Final = 30_000
"""The least time left for a lease that ran out during a gap, and the steady time required between two gaps."""
CLOCK_NEAR_MS: Final = 10
"""The largest difference between clocks that agree."""
CLOCK_APART_MS: Final = 1_000
"""The least difference between the clocks that jobs due at an instant follow."""
CLOCK_DOUBT_MS: Final = 15 * MINUTE_MS
"""The time until a jump of the clock is proven."""
CLOCK_LAG_KEPT_MS: Final = 30 * DAY_MS
"""The time for which deletion lags behind after a jump that proved wrong."""
CLOCK_SET_BACK_MS: Final = MINUTE_MS
"""After a correction backwards of at least this size, the slots of schedulers are computed again."""
CLOCK_RECHECK_MS: Final = 10 * MINUTE_MS
"""The time for which slots are computed again."""
CLOCK_SLOWLY: Final = 100
"""Queue time runs at most one part in this number faster or slower than the clock."""

BOUNDS: Final = {name: value for name, value in globals().items() if name.isupper() and type(value) is int}
"""All of them by name."""
