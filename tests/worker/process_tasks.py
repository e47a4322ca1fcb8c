"""Tasks for processes, which find them here by name."""

from __future__ import annotations

import os
import signal
import threading
import time

from penstock import App, JobContext, RateLimited, Retry, Snooze, Suspend, Unrecoverable, current_job

app = App("memory://", backoff="1ms")


@app.task(queue="cpu", runner="process")
def square(n: int) -> int:
    return n * n


@app.task(queue="cpu", runner="process")
def repeat(n: int) -> str:
    return "é" * n


@app.task(queue="cpu", runner="process")
def measure(text: str) -> int:
    return len(text)


@app.task(queue="cpu", runner="process", attempts=1)
def die(code: int) -> None:
    os._exit(code)


@app.task(queue="cpu", runner="process", attempts=1)
def die_and_leave_another(code: int) -> None:
    """The other has our end of the pipe, and keeps it open."""
    other = os.fork()
    if other == 0:
        time.sleep(60)
        os._exit(0)
    current_job().log(str(other))
    os._exit(code)


@app.task(queue="cpu", runner="process", attempts=1)
def die_amid_the_result(*, leave_another: bool) -> str:
    """Killed while a large result is on its way, with or without another that has our end of the pipe."""
    if leave_another:
        other = os.fork()
        if other == 0:
            time.sleep(60)
            os._exit(0)
        current_job().log(str(other))
    sending = current_job()._link._lock  # type: ignore[attr-defined]

    def kill() -> None:
        while not sending.locked():
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    return "x" * 64_000_000


@app.task(queue="cpu", runner="process")
def wait_for(path: str) -> str:
    current_job().log("waiting")
    while not os.path.exists(path):
        time.sleep(0.005)
    return "there"


@app.task(queue="cpu", runner="process", attempts=1)
def fail() -> None:
    raise ZeroDivisionError("in another process")


@app.task(queue="cpu", runner="process", attempts=1, timeout="300ms")
def hang_with_timeout() -> None:
    time.sleep(60)


@app.task(queue="cpu", runner="process")
def hang() -> None:
    current_job().log("hanging")
    time.sleep(60)


@app.task(queue="cpu", runner="process")
def whoami() -> int:
    return os.getpid()


@app.task(queue="cpu", runner="process")
def talk(context: JobContext) -> str:
    context.log("one")
    context.progress({"done": 0.5})
    current_job().log("two")
    return context.id


@app.task(queue="cpu", runner="process", attempts=1)
def talk_at_once(threads: int, lines: int) -> None:
    job = current_job()

    def talk(number: int) -> None:
        for _ in range(lines):
            job.log(str(number) * 20_000)

    talkers = [threading.Thread(target=talk, args=(number,)) for number in range(threads)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()


@app.task(queue="cpu", runner="process", attempts=3)
def verdict(context: JobContext, kind: str) -> list[int]:
    if context.run == 1:
        match kind:
            case "snooze":
                raise Snooze("1ms")
            case "rate limit":
                raise RateLimited("1ms", scope="queue")
            case "retry":
                raise Retry(delay="1ms")
            case "unrecoverable":
                raise Unrecoverable("never")
            case "discard":
                context.discard()
                raise ValueError("never")
            case _:
                raise AssertionError(kind)
    return [context.run, context.failures]


def plain(n: int) -> int:
    return n + 1


renamed = app.task(name="registered-under-another-name", queue="cpu", runner="process")(plain)


@app.task(queue="cpu", runner="process")
def ask(context: JobContext) -> object:
    if context.stage == "":
        raise Suspend("answer", timeout="1h", stage="asked")
    return [context.stage, context.signal.data if context.signal else None]


@app.task(queue="usage", runner="process", attempts=1)
def use_tokens(n: int) -> None:
    current_job().use(tokens=n)


def leave_another_behind(_: object, path: str) -> None:
    """What a child serves that reads nothing and leaves another that has its end of the pipe."""
    other = os.fork()
    if other == 0:
        time.sleep(60)
        os._exit(0)
    with open(path, "w") as file:
        file.write(f"{other}\n")
    os._exit(7)


def leave_with_seven(_: object) -> None:
    """What a child serves that leaves at once."""
    os._exit(7)


@app.task(queue="cpu", runner="process", retry_on=ConnectionError)
def choosy(kind: str) -> None:
    raise ConnectionResetError("away") if kind == "retried" else KeyError("no such key")


@app.task(
    queue="cpu",
    runner="process",
    backoff="1h",
    give_up_on=KeyError,
    retry_on={OSError: lambda failures, error: "2h"},
)
def choosy_about_delays(kind: str) -> None:
    raise ConnectionResetError("away") if kind == "retried" else KeyError("no such key")


@app.handler("payloads", runner="process")
def halve(number: int) -> tuple[float, int]:
    return number / 2, os.getpid()
