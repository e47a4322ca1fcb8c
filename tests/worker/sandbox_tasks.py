"""Tasks for sandboxes, which find them here by name."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from penstock import App, JobContext, Snooze, Unrecoverable, current_job

app = App("memory://", backoff="1ms", attempts=1)

leaked: list[int] = []


@app.task(queue="box", runner="sandbox")
def square(n: int) -> int:
    return n * n


@app.task(queue="box", runner="sandbox")
async def square_later(n: int) -> int:
    current_job().log("later")
    await asyncio.sleep(0)
    return n * n


@app.task(queue="box", runner="sandbox")
def leak() -> tuple[int, int]:
    leaked.append(1)
    return os.getpid(), len(leaked)


@app.task(queue="box", runner="sandbox")
def fail() -> None:
    raise ZeroDivisionError("in a sandbox")


@app.task(queue="box", runner="sandbox")
def give_up() -> None:
    raise Unrecoverable("never")


@app.task(queue="box", runner="sandbox")
def come_again(context: JobContext) -> int:
    if context.run == 1:
        raise Snooze("1ms")
    return context.run


@app.task(queue="box", runner="sandbox", attempts=2)
def change(context: JobContext, n: int) -> int:
    context.progress(n)
    context.update_payload(n + 1)
    if context.run == 1:
        raise ValueError("again")
    return n


@app.task(queue="box", runner="sandbox")
def unencodable() -> object:
    return object()


@app.task(queue="box", runner="sandbox")
def leave(code: int) -> None:
    print("leaving", end=" ", flush=True)
    print("now")
    os._exit(code)


@app.task(queue="box", runner="sandbox")
def crash() -> None:
    print("before the crash")
    ctypes.string_at(0)


@app.task(queue="box", runner="sandbox")
def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(queue="box", runner="sandbox", memory="96MiB")
def hoard() -> str:
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


@app.task(queue="box", runner="sandbox", memory="96MiB")
def take(mib: int) -> int:
    return len(bytearray(mib << 20)) >> 20


@app.task(queue="box", runner="sandbox", cpu_time="300ms", timeout="60s")
def burn() -> None:
    while True:
        pass


@app.task(queue="box", runner="sandbox", cpu_time="300ms")
def rest() -> str:
    time.sleep(0.6)
    return "rested"


@app.task(queue="box", runner="sandbox", timeout="300ms")
def hang_with_timeout() -> None:
    hang_here()


def hang_here() -> None:
    time.sleep(60)


@app.task(queue="box", runner="sandbox")
def hang(ready: str) -> None:
    try:
        Path(ready).write_text(str(os.getpid()))
        time.sleep(60)
    finally:
        Path(ready).with_suffix(".cleaned").touch()


@app.task(queue="box", runner="sandbox")
async def hang_on_loop(ready: str) -> None:
    try:
        Path(ready).write_text(str(os.getpid()))
        await asyncio.sleep(60)
    finally:
        Path(ready).with_suffix(".cleaned").touch()


@app.task(queue="box", runner="sandbox")
def ignore_sigterm(ready: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(ready).write_text(str(os.getpid()))
    time.sleep(60)


@app.task(queue="box", runner="sandbox")
def return_after_sigterm(context: JobContext, ready: str) -> str:
    seen: list[bool] = []
    watcher = threading.Thread(target=lambda: _until_cancelled(context, seen))
    watcher.start()
    try:
        Path(ready).write_text(str(os.getpid()))
        time.sleep(60)
    except SystemExit:
        watcher.join()
        context.log(f"cancelled: {seen}")
    return "as if nothing had been"


def _until_cancelled(context: JobContext, seen: list[bool]) -> None:
    while not context.cancelled:
        time.sleep(0.005)
    seen.append(True)


@app.task(queue="box", runner="sandbox")
def start_another(ready: str, end: str) -> int:
    """A process of the system, and one that was forked and holds all our pipes open."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    Path(ready).write_text(f"{os.getpid()} {started.pid} {forked.pid}")
    match end:
        case "return":
            return 1
        case "exit":
            os._exit(3)
        case _:
            time.sleep(60)
    return 0


@app.task(queue="box", runner="sandbox")
def hold_the_lock(ready: str, end: str) -> None:
    """In C, without letting any other thread of the process run."""
    Path(ready).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(60)


@app.task(queue="box", runner="sandbox")
def talk() -> None:
    print("out 1")
    print("err 2", file=sys.stderr)
    os.write(1, b"raw 3\n")
    subprocess.run([sys.executable, "-c", "print('child 4')"], check=True)
    print("nicht lateinisch: żółw \udcff\0")
    print("no end of line", end="")


@app.task(queue="box", runner="sandbox")
def shout(lines: int) -> None:
    for number in range(lines):
        print(f"line {number} {'x' * 90}")
    print("y" * 10_000)
    print("the last words")


@app.task(queue="box", runner="sandbox")
def register_exit(path: str) -> None:
    atexit.register(lambda: Path(path).touch())


@app.task(queue="box", runner="sandbox")
def close_streams() -> str:
    sys.stdout.close()
    os.close(2)
    return "closed"


@app.task(queue="box", runner="sandbox", timeout="300ms")
def hang_amid_a_message() -> None:
    """Deaf to the signal that asks it to stop, and its worker waits for the rest of the message."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(current_job()._link._pipe.fileno(), struct.pack("!i", 1000) + b"half of it")  # type: ignore[attr-defined]
    while True:
        time.sleep(60)
