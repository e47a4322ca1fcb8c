"""The options of a job on the command line: flags of ``penstock enqueue``, and keys of jobs in JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from penstock.cli.completion import completes_ids
from penstock.cli.parameters import OPEN, all_options, option
from penstock.cli.values import duration, duration_or, instant_or, nonzero_duration

F = TypeVar("F", bound=Callable[..., Any])


class JobOption(NamedTuple):
    """An option of a job: a flag of ``penstock enqueue``, and a key of a job in JSON. ``type`` is its type in JSON.

    ``read`` parses the text of the flag. ``more`` are further arguments of ``option``.
    """

    name: str
    metavar: str
    type: Any
    help: str
    read: Callable[[str], Any] | None = None
    more: Mapping[str, Any] = MappingProxyType({})

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


JOB_OPTIONS: Final = (
    JobOption(
        "id",
        "ID",
        str,
        "Id of the job. A known id is enqueued again only if its job failed or was cancelled. [generated]",
    ),
    JobOption("delay", "DURATION", str | float, "Wait this long before the first run.", duration),
    JobOption(
        "at",
        "TIME",
        str,
        "Do not run before this time: 18:30, 'tomorrow 9:00', '2026-12-01 08:00'; local unless it has a zone.",
        instant_or("--delay"),
    ),
    JobOption("priority", "NUMBER", int, "Smaller numbers run first."),
    JobOption(
        "timeout",
        "DURATION",
        str | float | None,
        "Kill a run that takes longer. It counts as failed, and is retried.",
        nonzero_duration,
    ),
    JobOption("attempts", "NUMBER", int, "Maximum number of runs, if they fail."),
    JobOption("max_retries", "NUMBER", int, "Retries after the first run: --max-retries 4 is --attempts 5."),
    JobOption(
        "backoff",
        "DURATION",
        str | float,
        "Delay between attempts; or 'exponential'.",
        duration_or("exponential"),
    ),
    JobOption("max_stalls", "NUMBER", int, "Number of times that its worker may die before the job fails."),
    JobOption(
        "ttl", "DURATION", str | float, "Fail the job as expired if it has not ended by then.", duration
    ),
    JobOption(
        "result_ttl", "DURATION", str | float, "Keep the job for this long after it completes.", duration
    ),
    JobOption("failure_ttl", "DURATION", str | float, "Keep the job for this long after it fails.", duration),
    JobOption("group", "KEY", str, "Group of the job, whose jobs share limits: see `penstock limit`."),
    JobOption("cost", "NUMBER", int, "Tokens that a run takes from the bucket of its group. [1]"),
    JobOption(
        "after",
        "ID",
        str | list[str],
        "Run the job after this one of its own queue has completed; QUEUE/ID for another queue. May be repeated.",
        more={"multiple": True, "shell_complete": completes_ids(*OPEN)},
    ),
)
"""All options of a job on the command line. Flags and keys derive from this list."""


def job_flags(*names: str) -> Callable[[F], F]:
    """Add the flags of these options to a command, or of all options."""
    chosen = [each for each in JOB_OPTIONS if not names or each.name in names]
    return all_options(
        *(option(f"{each.flag} {each.metavar}", each.help, each.read, **each.more) for each in chosen)
    )
