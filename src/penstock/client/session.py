"""Sessions: the connection of an app on one event loop, and the choice of its store.

A connection belongs to the event loop that opened it, an app to the whole process, so an app has one session per loop.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, unquote

from penstock.client.hints import FOREIGN_STORES
from penstock.client.waiter import Waiter
from penstock.core.job import Enqueued, NewJob
from penstock.core.lifecycle import StepAnswer
from penstock.core.names import uuid7
from penstock.core.outcome import Complete
from penstock.core.step import NewStep
from penstock.core.text import get_logger, shown, split_url, visible_in_line, without_password
from penstock.errors import InvalidOption, StorageError
from penstock.storage import open_storage
from penstock.storage.coalesce import Coalescer
from penstock.storage.values import Extended, Held, Settled, Settlement

if TYPE_CHECKING:
    from penstock.client.middleware import EnqueueChain
    from penstock.storage.contract import Storage


_ITEM_BYTES: Final = 64
"""The approximate size of an item without its payload."""


class Session:
    """An open storage on one event loop. It sends concurrent calls together, and waits for results."""

    __slots__ = (
        "_enqueues",
        "_extends",
        "_settles",
        "_steps",
        "_sweeps_due",
        "_waiters",
        "enqueue_chain",
        "storage",
        "worker",
    )
    remedy: ClassVar[str] = ""
    """The remedy for a job that does not run, if it differs from that of ``why``."""

    def __init__(self, storage: Storage, enqueue_chain: EnqueueChain) -> None:
        self.storage = storage
        self.enqueue_chain = enqueue_chain
        self.worker = _worker_name()
        """The worker name of claims outside a worker."""
        self._enqueues: dict[str, Callable[[NewJob], Awaitable[Enqueued]]] = {}
        self._settles: dict[str, Coalescer[Settlement, Settled]] = {}
        self._extends: dict[tuple[str, str, int], Coalescer[Held, Extended]] = {}
        self._steps: dict[tuple[str, int], Coalescer[NewStep, StepAnswer]] = {}
        self._waiters: dict[str, Waiter] = {}
        self._sweeps_due: dict[str, float] = {}

    def enqueue(self, queue: str, job: NewJob) -> Awaitable[Enqueued]:
        """Enqueue one job, together with those of concurrent callers.

        A job that waits for others is sent alone, because the store may refuse it, and would refuse the batch.
        """
        call: Callable[[NewJob], Awaitable[Enqueued]] | None
        if job.after:
            call = partial(self._enqueue_alone, queue)
        elif (call := self._enqueues.get(queue)) is None:
            call = self._enqueues[queue] = self._enqueues_to(queue).call
        return self._enqueue_through(queue, job, call) if self.enqueue_chain.layers else call(job)

    async def _enqueue_through(
        self, queue: str, job: NewJob, call: Callable[[NewJob], Awaitable[Enqueued]]
    ) -> Enqueued:
        async def send(jobs: Sequence[NewJob]) -> list[Enqueued]:
            return [await call(job) for job in jobs]

        [answer] = await self.enqueue_chain.enqueue(queue, [job], send)
        return answer

    async def _enqueue_alone(self, queue: str, job: NewJob) -> Enqueued:
        [answer] = await self.storage.enqueue(queue, [job])
        return answer

    def _enqueues_to(self, queue: str) -> Coalescer[NewJob, Enqueued]:
        enqueue = self.storage.enqueue
        return Coalescer(lambda jobs: enqueue(queue, jobs), size=_weight_of_job)

    async def settle(self, queue: str, settlement: Settlement) -> Settled:
        """Apply one outcome, together with the others pending for this queue."""
        settles = self._settles.get(queue)
        if settles is None:

            async def send(settlements: list[Settlement]) -> list[Settled]:
                return (await self.storage.settle(queue, settlements)).answers

            settles = self._settles[queue] = Coalescer(send, size=_weight_of_settlement)
        return await settles.call(settlement)

    async def extend(self, queue: str, held: Held, *, worker: str, lease_ms: int) -> Extended:
        """Extend one lease, together with others of the same queue, worker and length."""
        key = (queue, worker, lease_ms)
        extends = self._extends.get(key)
        if extends is None:
            extend = self.storage.extend
            extends = self._extends[key] = Coalescer(
                lambda all_held: extend(queue, all_held, worker=worker, lease_ms=lease_ms),
                size=lambda _: _ITEM_BYTES,
            )
        return await extends.call(held)

    def record_step(self, queue: str, step: NewStep, *, lease_ms: int) -> asyncio.Future[StepAnswer]:
        """Record a step of a running job, together with those of other jobs of this queue."""
        key = (queue, lease_ms)
        steps = self._steps.get(key)
        if steps is None:
            record = self.storage.record_steps
            steps = self._steps[key] = Coalescer(
                lambda pending: record(queue, pending, lease_ms=lease_ms), size=_weight_of_step
            )
        return steps.submit(step)

    def waiter(self, queue: str) -> Waiter:
        """Return the waiter for the jobs of this queue."""
        waiter = self._waiters.get(queue)
        if waiter is None:
            waiter = self._waiters[queue] = Waiter(self.storage, queue)
        return waiter

    def sweep_is_due(self, queue: str, every_ms: int) -> bool:
        """Return whether the last sweep from here is ``every_ms`` old; if so, the caller must sweep now."""
        now = asyncio.get_running_loop().time()
        if now < self._sweeps_due.get(queue, 0.0):
            return False
        self._sweeps_due[queue] = now + every_ms / 1000
        return True

    async def close(self, *, storage_too: bool = True) -> None:
        """End the waits, and close the storage if it belongs to the app."""
        for waiter in self._waiters.values():
            await waiter.close()
        if storage_too:
            await self.storage.close()


def _weight_of_job(job: NewJob) -> int:
    return len(job.payload) + _ITEM_BYTES


def _weight_of_settlement(settlement: Settlement) -> int:
    outcome = settlement.outcome
    return _ITEM_BYTES + len(outcome.result) if isinstance(outcome, Complete) else _ITEM_BYTES


def _weight_of_step(step: NewStep) -> int:
    return len(step.result) + _ITEM_BYTES


def _worker_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", platform.node())[:100] or "host"
    return f"{host}:{os.getpid()}:{uuid7()[-8:]}"


_log = get_logger(__name__)

_OTHER_LOOP_S: Final = 5.0

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A resource for each event loop that uses it. ``open`` opens it on the running loop, ``end`` closes it.

    It is closed by ``close()``, or with its loop: an asynchronous generator keeps it there, and
    ``asyncio.run`` closes the generators of its loop at the end. After a fork, the child begins with none.
    """

    def __init__(self, open: Callable[[], Awaitable[T]], *, end: Callable[[T], Awaitable[None]]) -> None:
        self._open = open
        self._end = end
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._ready: dict[asyncio.AbstractEventLoop, T] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[T]] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}

    async def get(self) -> T:
        """Return the resource of the running loop, and open it if needed. After an error, the next call tries again."""
        loop = asyncio.get_running_loop()
        ready = self._ready.get(loop)
        if ready is not None:
            return ready
        opening = self._opening.get(loop)
        if opening is None:
            opening = self._opening[loop] = loop.create_task(self._begin(loop))
            opening.add_done_callback(lambda _: self._opening.pop(loop, None))
        # Shielded, because other callers may wait for the same connection.
        return await asyncio.shield(opening)

    async def close(self) -> None:
        """Close the resources of all loops; other running loops close theirs themselves."""
        here = asyncio.get_running_loop()
        for loop, keeper in list(self._keepers.items()):
            if loop is here:
                await keeper.aclose()
            elif loop.is_running():
                await _ask_to_close(loop, keeper)
            else:
                self._drop(loop)

    def close_idle(self) -> None:
        """Close the resources of loops that run in other threads or do not run, from synchronous code.

        The resource of the running loop is closed with that loop.
        """
        here = asyncio._get_running_loop()
        for loop, keeper in list(self._keepers.items()):
            if loop.is_closed():
                self._drop(loop)
            elif loop.is_running() and loop is not here:
                asyncio.run_coroutine_threadsafe(_close(keeper), loop).result(_OTHER_LOOP_S)
            elif here is None:
                loop.run_until_complete(_close(keeper))

    async def _begin(self, loop: asyncio.AbstractEventLoop) -> T:
        for dead in [other for other in list(self._ready) if other.is_closed()]:
            self._drop(dead)
        opened = await self._open()
        keeper = self._keep(loop, opened)
        await anext(keeper)
        self._keepers[loop] = keeper
        self._ready[loop] = opened
        return opened

    async def _keep(self, loop: asyncio.AbstractEventLoop, opened: T) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._drop(loop)
            await self._end(opened)

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ready.pop(loop, None)
        self._keepers.pop(loop, None)


class Sessions(PerLoop[Session]):
    """The sessions of an app. ``open`` returns an open storage for the running loop."""

    def __init__(
        self,
        open: Callable[[], Awaitable[Storage]],
        *,
        enqueue_chain: EnqueueChain,
        close_storage: bool,
        session: Callable[[Storage, EnqueueChain], Session] = Session,
    ) -> None:
        async def begin() -> Session:
            return session(await open(), enqueue_chain)

        async def end(session: Session) -> None:
            await session.close(storage_too=close_storage)

        super().__init__(begin, end=end)


async def _close(keeper: AsyncGenerator[None, None]) -> None:
    await keeper.aclose()


async def _ask_to_close(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[None, None]) -> None:
    closing = asyncio.run_coroutine_threadsafe(_close(keeper), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(closing), _OTHER_LOOP_S)
    except TimeoutError:
        _log.warning("the connection of a busy event loop stays open until its loop ends: %r", loop)


_all: weakref.WeakSet[PerLoop[Any]] = weakref.WeakSet()
# The connections of the parent. A child never closes them, because that could affect the parent (a TLS goodbye, a lock
# on the file).
_inherited: list[object] = []


def _reset_after_fork() -> None:
    for resource in list(_all):
        _inherited.append((resource._ready, resource._opening, resource._keepers))
        resource._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


# The choice of the store. From the highest rank to the lowest: a flag of the command line, the code, the environment,
# the files that only the command line reads, the default.


DEFAULT_URL: Final = "sqlite:///penstock.db"


class StoreName(NamedTuple):
    """The store and the namespace that one place names; ``None`` if it names none."""

    url: str | None = None
    namespace: str | None = None


def chosen_store(names: Iterable[StoreName]) -> tuple[str, str | None]:
    """Return the URL and the namespace to use. ``names`` are in the order of their rank.

    The first URL and the first namespace win, independently of each other. A namespace in the chosen URL has the rank
    of that URL; then the returned namespace is ``None``, unless a higher rank names one.
    """
    url = namespace = None
    for name in names:
        namespace = namespace or name.namespace
        if url is None and name.url:
            url = name.url
            if namespace is None and _named_in(url):
                return url, None
        if url is not None and namespace is not None:
            break
    return url or DEFAULT_URL, namespace


def check_url(url: str) -> None:
    """Raise ``InvalidOption`` for a URL that cannot name a store, before the app connects.

    The message does not quote a URL that may contain a password.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise InvalidOption(
            "the first argument of App(...) is not a URL: it has no scheme. Give the URL of the store, such as "
            "sqlite:///penstock.db or valkey://host. An app has no name."
        )
    if remedy := FOREIGN_STORES.get(scheme.lower()):
        raise InvalidOption(f"{scheme}:// is not a store of Penstock. {remedy}.")
    if scheme.lower() == "sqlite" and split_url(url).netloc:
        raise InvalidOption(
            f"{shown(url)} names no file. Use three slashes for a relative path (sqlite:///penstock.db), four for "
            "an absolute one (sqlite:////var/lib/penstock.db)."
        )


def from_environment() -> StoreName:
    """Return what ``PENSTOCK_URL`` and ``PENSTOCK_NAMESPACE`` name."""
    return StoreName(os.environ.get("PENSTOCK_URL"), os.environ.get("PENSTOCK_NAMESPACE"))


def shown_store(url: str, namespace: str | None) -> str:
    """Return the store and the namespace for a log line or a screen, without passwords.

    The path of a file is absolute, because a relative one depends on the folder.
    """
    namespace = namespace or _named_in(url) or "default"
    return f"{visible_in_line(without_password(_absolute(url)))}, namespace {namespace}"


def store_options(named: StoreName) -> tuple[str, ...]:
    """Return the command line options that name the same store as the code.

    A URL with a password is left out; the reader must set ``PENSTOCK_URL``. No command can reach ``memory://``.
    """
    if named.url is None or named.url.startswith("memory:"):
        return ()
    namespace = ("--namespace", named.namespace) if named.namespace else ()
    has_password = without_password(named.url) != named.url
    return namespace if has_password else ("--url", _absolute(named.url), *namespace)


def _absolute(url: str) -> str:
    parts = split_url(url)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        return url
    path = quote(os.path.abspath(unquote(parts.path[1:])))
    return f"sqlite:///{path}?{parts.query}" if parts.query else f"sqlite:///{path}"


def _named_in(url: str) -> str:
    return parse_qs(split_url(url).query).get("namespace", [""])[0]


class StorageFactory:
    """A factory of storages for ``url``, or a given open storage, which the app does not close (``is_ours``)."""

    def __init__(self, given: str | Storage, *, namespace: str | None) -> None:
        self._storage = None if isinstance(given, str) else _checked_storage(given)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._namespace = namespace
        self.url = _shared_by_loops(given) if isinstance(given, str) else given.url
        self.is_ours = self._storage is None

    async def open(self) -> Storage:
        """Return an open storage for the running loop. Raise ``StorageError``, or ``InvalidOption`` for the URL."""
        if self._storage is not None:
            return self._given(self._storage)
        options = {} if self._namespace is None else {"namespace": self._namespace}
        storage = open_storage(self.url, **options)
        await storage.open()
        return storage

    def _given(self, storage: Storage) -> Storage:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise StorageError(
                "the storage of this app belongs to another event loop, which used the app before. "
                "Pass a URL to the app, so that every loop gets its own connection."
            )
        self._loop = loop
        return storage


def _checked_storage(given: Storage) -> Storage:
    if not hasattr(given, "capabilities"):
        raise InvalidOption(
            f"url must be a URL such as 'sqlite:///penstock.db', or an open storage, got {shown(given)}."
        )
    return given


def _shared_by_loops(url: str) -> str:
    """Return the URL, with a name for an unnamed ``memory://``: without one, each loop would have its own store."""
    parts = split_url(url)
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return parts._replace(netloc=f"app-{uuid7()}").geturl()
    return url
