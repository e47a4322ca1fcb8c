"""Tasks that wrap a failure in ``Unrecoverable`` or ``Retry``, which processes find here by name."""

from __future__ import annotations

from penstock import App, Retry, Unrecoverable

app = App("memory://", backoff="1h", attempts=3)


class NoSuchUser(Unrecoverable):
    """A verdict of the user's own."""


class Busy(Retry):
    """A verdict of the user's own that asks for another run."""


users: dict[str, int] = {}


def lookup(kind: str) -> None:
    try:
        users["ada"]
    except KeyError as error:
        match kind:
            case "from":
                raise Unrecoverable("no such user") from error
            case "from, same words":
                raise Unrecoverable(str(error)) from error
            case "from, without words":
                raise Unrecoverable from error
            case "argument":
                raise Unrecoverable(error) from None
            case "argument, chained":
                raise Unrecoverable(error)  # noqa: B904
            case "own class":
                raise NoSuchUser("ada") from error
            case "unrelated":
                raise Unrecoverable("no such user") from None
            case "retry, from":
                raise Retry("try later", delay="1ms") from error
            case "retry, without words":
                raise Retry(delay="1ms") from error
            case "retry, argument":
                raise Retry(error, delay="1ms") from None
            case "retry, own class":
                raise Busy("ada", delay="1ms") from error
            case "retry, unrelated":
                raise Retry("try later", delay="1ms") from None
            case _:
                raise AssertionError(kind) from error


in_process = app.task(name="in_process", runner="process")(lookup)
in_sandbox = app.task(name="in_sandbox", runner="sandbox")(lookup)
