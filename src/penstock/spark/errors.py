"""Errors of ``penstock.spark``. All of them are ``PenstockError``s."""

from __future__ import annotations

from penstock.errors import InvalidInput, PenstockError


class BadKey(InvalidInput):
    """A key that cannot identify a job: it is null, or its type has no canonical form."""


class BadRow(InvalidInput):
    """A row that cannot become a job."""


class ArchiveTorn(PenstockError):
    """The archive differs from what the store had."""


class OutputBusy(PenstockError):
    """Another run is writing to the output."""


class OutputLost(PenstockError):
    """The run lost its lease on the output: it was away for too long, and another run took over."""


class TooManyFailures(PenstockError):
    """More rows failed than ``max_failures`` or ``max_failure_rate`` allows. Finished rows are in the output."""


class FleetFailed(PenstockError):
    """Spark gave up the fleet, its workers could not start, or they took its driver for dead. Other workers take over
    the jobs that were running."""
