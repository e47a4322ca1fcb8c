"""Expectations: what a result must be like for its row to count as completed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from penstock.core.display import shown
from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.core.outcome import Failure
from penstock.errors import InvalidOption
from penstock.importing import find_function
from penstock.spark.arrow import json_text
from penstock.task import Task

__all__ = ["Expectations", "Expected", "open_expectations"]

Expectation: TypeAlias = Callable[[Any], object]
Expectations: TypeAlias = Expectation | str | Mapping[str, Expectation | str]
"""A predicate on results, or its name as ``module:function``; or several of them, by name."""

FAILURE_TYPE: Final = "ExpectationFailed"
_SHOWN: Final = 300


def open_expectations(expect: Expectations, task: Task[..., Any]) -> Expected:
    """Return the expectations on results of a task.

    Raises:
        InvalidOption: something that cannot be called, or a function that cannot be found.
    """
    given = expect if isinstance(expect, Mapping) else {"": expect}
    found = {}
    for name, predicate in given.items():
        chosen = find_function(predicate) if isinstance(predicate, str) else predicate
        if not callable(chosen):
            raise InvalidOption(
                f"expect must be a function of the result, its name as 'module:function', or a dict of them by name, "
                f"got {shown(repr(expect))}."
            )
        found[name or getattr(chosen, "__name__", repr(chosen))] = chosen
    return Expected(found, task)


class Expected:
    """Predicates by name, on the results of one task."""

    def __init__(self, predicates: Mapping[str, Expectation], task: Task[..., Any]) -> None:
        self._predicates = predicates
        self._decode = task.source.decode_result

    def judged(self, job: Job) -> Job:
        """Return the job; as a failed one if it has completed with a result that is not as expected."""
        if job.state is not State.COMPLETED:
            return job
        why = self._complaint(job.result or b"null")
        if not why:
            return job
        return msgspec.structs.replace(job, state=State.FAILED, failure=Failure(FAILURE_TYPE, why))

    def _complaint(self, result: bytes) -> str:
        text = f"{json_text(result)!s:.{_SHOWN}}"
        for name, predicate in self._predicates.items():
            try:
                # Each gets its own: one that changes the value does not change what the next one sees.
                if not predicate(self._decode(result)):
                    return f"the result is not as expected by {name}: {text}"
            except Exception as error:
                return f"the expectation {name} raised {type(error).__name__}: {error}. The result: {text}"
        return ""
