"""What goes wrong with tables. All are ``PenstockError``s."""

from __future__ import annotations

from penstock.errors import InvalidInput, PenstockError


class BadKey(InvalidInput):
    """A key that cannot name a job: it is null, or of a type without a canonical form."""


class BadRow(InvalidInput):
    """A row that cannot be a job."""


class ArchiveTorn(PenstockError):
    """An archive does not hold what the store had."""


class OutputBusy(PenstockError):
    """Another run is writing to the output."""


class OutputLost(PenstockError):
    """The run no longer has the right to write to its output: it was away for too long, and another took over."""


class TooManyFailures(PenstockError):
    """More rows have failed than ``max_failures`` or ``max_failure_rate`` allows. What was done is in the output."""


class FleetFailed(PenstockError):
    """Spark has given up a fleet, its workers could not begin, or they have taken its driver for dead. Jobs that were
    under way are taken over by others."""
