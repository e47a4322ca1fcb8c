"""What every Python adapter imports: the roles, the payload, the tick.

An adapter subclasses `Adapter`, overrides what its system has, and ends with `peer.main(MyAdapter)`.
Methods may be plain or `async def`; if any is async, all run in one event loop (uvloop when the
adapter's environment has it).

The harness starts the adapter file once per role (`argv[1]`):

    one      open(); time enqueue_one(payloads)
    bulk     open(); time enqueue_bulk(payloads)
    e2e      open(); enqueue_bulk(warm-up); wait till handled; time enqueue_bulk(payloads)
    latency  open(); roundtrip(payload) again and again, one at a time
    wake     open(); enqueue_one([payload with a time stamp]), then a pause, again and again
    pending  open(); for every line on stdin, pending() as a line on stdout, until stdin closes
    worker   worker(): handle jobs, calling tick() (or tick_mp()) once per job, until killed
"""

import asyncio
import atexit
import inspect
import itertools
import json
import os
import random
import signal
import sqlite3
import struct
import sys
import threading
import time

URL = os.environ.get("PEERS_URL", "redis://127.0.0.1:6379/0")
HOST = "127.0.0.1"
PORT = int(os.environ.get("PEERS_PORT", "6379"))
DIR = os.environ.get("PEERS_DIR", ".")  # a scratch directory: the database of an embedded system
N = int(os.environ.get("PEERS_N", "1000"))
TARGET = int(os.environ.get("PEERS_TARGET", "0"))  # ticks the worker is expected to make
STOP = os.environ.get("PEERS_STOP") == "1"  # the worker ends itself (SIGTERM) at its target
WARM = int(os.environ.get("PEERS_WARM", "20"))
VARIANT = os.environ.get("PEERS_VARIANT", "")
WORKLOAD = os.environ.get("PEERS_WORKLOAD", "")
RESULTS = WORKLOAD == "latency"  # the workload waits for results: switch a result store on
QUEUE = "bench"
_TICKS = os.environ.get("PEERS_TICKS", "")
_OUT = os.environ.get("PEERS_OUT", "")
_STATEMENTS = os.environ.get("PEERS_STATEMENTS", "")


def opt(name, default):
    """A tunable: the environment's PEERS_OPT_<NAME> overrides the default."""
    value = os.environ.get("PEERS_OPT_" + name.upper())
    return default if value is None else type(default)(value)


def payload(i):
    """About 100 bytes as compact JSON."""
    to = f"user{i:07d}@example.com"
    return {"id": i, "to": to, "tpl": "welcome", "lang": "en", "at": 1700000000, "try": 1}


def dumps(obj):
    return json.dumps(obj, separators=(",", ":")).encode()


# A tick record: <pid, jobs since this process's last record, CLOCK_MONOTONIC ns, ns>. The last field is
# the process's CPU time; in the workload "wake" it is the time since the job was enqueued.
_REC = struct.Struct("<qqqq")
_fd = None
_count = itertools.count(1)
_written = 0
_lock = threading.Lock()


def _write(jobs, now, value):
    global _fd
    if _fd is None:
        _fd = os.open(_TICKS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(_fd, _REC.pack(os.getpid(), jobs, now, value))


def tick(job=None):
    """Once per handled job, for handlers that all run in one process (threads are fine).

    Give the payload to take part in the workload "wake".
    """
    global _written
    now = time.monotonic_ns()
    if WORKLOAD == "wake":
        _write(1, now, now - job["t0"])
        return
    n = next(_count)
    if n <= 64 or n >= TARGET or n % 250 == 0:
        with _lock:
            if n > _written:
                _write(n - _written, now, time.process_time_ns())
                _written = n
        if STOP and n == TARGET:
            os.kill(os.getpid(), signal.SIGTERM)


def tick_mp():
    """Once per handled job, for handlers spread over several processes (one write per job)."""
    _write(1, time.monotonic_ns(), time.process_time_ns())


def ticks():
    """How many jobs have been handled so far, by any process."""
    try:
        with open(_TICKS, "rb") as f:
            data = f.read()
    except FileNotFoundError:
        return 0
    return sum(r[1] for r in _REC.iter_unpack(data[: len(data) // _REC.size * _REC.size]))


def chunks(items, size):
    for i in range(0, len(items), size):
        yield items[i : i + size]


async def concurrently(fn, items, width):
    """`width` coroutines share the items: the plain way to keep an async client busy."""
    it = iter(items)

    async def one():
        for item in it:
            await fn(item)

    await asyncio.gather(*(one() for _ in range(width)))


class Adapter:
    def open(self):
        """Connect (not timed)."""

    def close(self):
        """Disconnect (not timed)."""

    def enqueue_one(self, payloads):
        """Add the jobs one by one, each confirmed before the next."""
        raise NotImplementedError

    def enqueue_bulk(self, payloads):
        """Add the jobs by the fastest documented way that is still confirmed when it returns."""
        return self.enqueue_one(payloads)

    def worker(self):
        """One worker process, until killed."""
        raise NotImplementedError

    def roundtrip(self, payload):
        """Enqueue one job, wait for its result, return it (the handler returns payload["id"])."""
        raise NotImplementedError

    def pending(self):
        """How many jobs are not finished; only for adapters that declare `pending = "adapter"`."""
        raise NotImplementedError


async def _maybe(value):
    return await value if inspect.isawaitable(value) else value


async def _warm_up(enqueue):
    await _maybe(enqueue([payload(i) for i in range(WARM)]))
    end = time.monotonic() + 30
    while ticks() < WARM:
        if time.monotonic() > end:
            raise TimeoutError("the worker did not handle the warm-up jobs")
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)


async def _produce(adapter, role):
    payloads = [payload(i) for i in range(N)]
    enqueue = adapter.enqueue_one if role == "one" else adapter.enqueue_bulk
    if role == "e2e":
        await _warm_up(enqueue)
    c0, t0 = time.process_time_ns(), time.monotonic_ns()
    await _maybe(enqueue(payloads))
    t1, c1 = time.monotonic_ns(), time.process_time_ns()
    return {"n": N, "t0": t0, "t1": t1, "cpu_ns": c1 - c0}


async def _latency(adapter, role):
    lat = []
    for i in range(WARM + N):
        t0 = time.monotonic_ns()
        got = await _maybe(adapter.roundtrip(payload(i)))
        t1 = time.monotonic_ns()
        if got != i:
            raise AssertionError(f"round trip {i} returned {got!r}")
        if i >= WARM:
            lat.append(t1 - t0)
    return {"n": N, "lat_ns": lat}


async def _wake(adapter, role):
    for i in range(N):
        await asyncio.sleep(random.uniform(0.03, 0.08))  # long enough for the worker to be idle again
        await _maybe(adapter.enqueue_one([payload(i) | {"t0": time.monotonic_ns()}]))
    return {"n": N}


async def _pending(adapter, role):
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(await _maybe(adapter.pending()), flush=True)
    return {}


_ROLES = {
    "one": _produce,
    "bulk": _produce,
    "e2e": _produce,
    "latency": _latency,
    "wake": _wake,
    "pending": _pending,
}


async def _run(adapter, role):
    if role == "worker":
        await _maybe(adapter.worker())
        return
    await _maybe(adapter.open())
    out = await _ROLES[role](adapter, role)
    with open(_OUT + ".part", "w") as f:
        json.dump(out, f)
    os.replace(_OUT + ".part", _OUT)
    await _maybe(adapter.close())


def _count_statements():
    """Count the SQL statements of every connection made by `sqlite3.connect`; write the sum at exit."""
    count, connect = itertools.count(), sqlite3.connect

    def counted(*args, **kw):
        db = connect(*args, **kw)
        db.set_trace_callback(lambda _: next(count))
        return db

    sqlite3.connect = sqlite3.dbapi2.connect = counted

    def save():
        with open(_STATEMENTS, "w") as f:
            f.write(str(next(count)))

    atexit.register(save)


def main(cls):
    """Play the role named by `argv[1]`."""
    role = sys.argv[1]
    adapter = cls()
    names = ("open", "close", "enqueue_one", "enqueue_bulk", "worker", "roundtrip", "pending")
    is_async = any(inspect.iscoroutinefunction(getattr(cls, n)) for n in names)
    if role == "worker" and not inspect.iscoroutinefunction(cls.worker):
        adapter.worker()  # no event loop around a blocking worker
        return
    if is_async:
        try:
            import uvloop
        except ImportError:
            pass
        else:
            uvloop.run(_run(adapter, role))
            return
    asyncio.run(_run(adapter, role))


if _STATEMENTS:
    _count_statements()  # at import, so that it comes before the adapter's own `from sqlite3 import connect`
