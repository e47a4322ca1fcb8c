"""What one event loop has of an app: an open storage, the calls that travel together, the waits for results."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from penstock.client.hints import FOREIGN_STORES
from penstock.client.waiter import Waiter
from penstock.core.job import Enqueued, NewJob
from penstock.core.names import uuid7
from penstock.core.outcome import Complete
from penstock.core.text import get_logger, shown, visible_in_line, without_password
from penstock.errors import InvalidOption, StorageError
from penstock.storage.coalesce import Coalescer
from penstock.storage.values import Extended, Held, Settled, Settlement

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.client.middleware import EnqueueChain
    from penstock.storage.contract import Storage


_SMALL: Final = 64
"""About what an item weighs on the wire besides its payload."""


class Session:
    """Belongs to one event loop, like the storage in it. Made and closed by ``App``."""

    __slots__ = (
        "_enqueues",
        "_extends",
        "_settles",
        "_sweeps_due",
        "_waiters",
        "enqueue_chain",
        "storage",
        "worker",
    )
    remedy: ClassVar[str] = ""
    """The remedy for a job that does not run, if it differs from what ``why`` says."""

    def __init__(self, storage: Storage, enqueue_chain: EnqueueChain) -> None:
        self.storage = storage
        self.enqueue_chain = enqueue_chain
        self.worker = _worker_name()
        """The name that claims outside any worker go by."""
        self._enqueues: dict[str, Callable[[NewJob], Awaitable[Enqueued]]] = {}
        self._settles: dict[str, Coalescer[Settlement, Settled]] = {}
        self._extends: dict[tuple[str, str, int], Coalescer[Held, Extended]] = {}
        self._waiters: dict[str, Waiter] = {}
        self._sweeps_due: dict[str, float] = {}

    def enqueue(self, queue: str, job: NewJob) -> Awaitable[Enqueued]:
        """Put one job in, together with all that other callers are putting in just now.

        One that waits for others goes alone: it may be refused, and would be refused for all.
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
        """Push one lease's deadline, together with the others of this queue, worker and length."""
        key = (queue, worker, lease_ms)
        extends = self._extends.get(key)
        if extends is None:
            extend = self.storage.extend
            extends = self._extends[key] = Coalescer(
                lambda all_held: extend(queue, all_held, worker=worker, lease_ms=lease_ms),
                size=lambda _: _SMALL,
            )
        return await extends.call(held)

    def waiter(self, queue: str) -> Waiter:
        """The one that waits for ends of jobs of this queue."""
        waiter = self._waiters.get(queue)
        if waiter is None:
            waiter = self._waiters[queue] = Waiter(self.storage, queue)
        return waiter

    def sweep_is_due(self, queue: str, every_ms: int) -> bool:
        """Whether nobody here swept the queue for ``every_ms``; if so, the caller is taken to do it now."""
        now = asyncio.get_running_loop().time()
        if now < self._sweeps_due.get(queue, 0.0):
            return False
        self._sweeps_due[queue] = now + every_ms / 1000
        return True

    async def close(self, *, storage_too: bool = True) -> None:
        """End the waits, then let go of the storage unless it is somebody else's."""
        for waiter in self._waiters.values():
            await waiter.close()
        if storage_too:
            await self.storage.close()


def _weight_of_job(job: NewJob) -> int:
    return len(job.payload) + _SMALL


def _weight_of_settlement(settlement: Settlement) -> int:
    outcome = settlement.outcome
    return _SMALL + len(outcome.result) if isinstance(outcome, Complete) else _SMALL


def _worker_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", platform.node())[:100] or "host"
    return f"{host}:{os.getpid()}:{uuid7()[-8:]}"


# One session per event loop: a connection belongs to the loop it was opened in, an app to the whole
# process.


_log = get_logger(__name__)

_OTHER_LOOP_S: Final = 5.0

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One of something for each event loop that asks. ``open`` makes it for the running one, ``end`` ends it.

    It ends by ``close()``, or with its loop: an asynchronous generator stands in for it there, and
    ``asyncio.run`` closes those of its loop before it leaves. After a fork the child begins with none.
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
        """The running loop's, opened if need be. Raises what opening raises; the next call tries again."""
        loop = asyncio.get_running_loop()
        ready = self._ready.get(loop)
        if ready is not None:
            return ready
        opening = self._opening.get(loop)
        if opening is None:
            opening = self._opening[loop] = loop.create_task(self._begin(loop))
            opening.add_done_callback(lambda _: self._opening.pop(loop, None))
        # Shielded: others may wait for the same connection when one of them gives up.
        return await asyncio.shield(opening)

    async def close(self) -> None:
        """End those of all loops: of this one here, of others that are running by asking them."""
        here = asyncio.get_running_loop()
        for loop, keeper in list(self._keepers.items()):
            if loop is here:
                await keeper.aclose()
            elif loop.is_running():
                await _ask_to_close(loop, keeper)
            else:
                self._drop(loop)

    def close_idle(self) -> None:
        """What synchronous code can do of ``close()``: end those of loops that run in other threads, or rest.

        The running loop's ends with that loop.
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
    """The sessions of an app. ``open`` gives an open storage for the running loop."""

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
    asked = asyncio.run_coroutine_threadsafe(_close(keeper), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(asked), _OTHER_LOOP_S)
    except TimeoutError:
        _log.warning("the connection of a busy event loop stays open until its loop ends: %r", loop)


_all: weakref.WeakSet[PerLoop[Any]] = weakref.WeakSet()
# The parent's connections, kept for ever in a child: to close them there would close them for the parent
# (a TLS goodbye, a lock on the file).
_inherited: list[object] = []


def _begin_afresh() -> None:
    for each in list(_all):
        _inherited.append((each._ready, each._opening, each._keepers))
        each._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_afresh)


# The storage of an app: from a URL, one for every event loop, or given, for one loop only.
#
# ``chosen_store`` is the one rule for which store that is. From the highest rank to the lowest: a flag of
# the command line, the code, the environment, the files that only the command line reads, the default.


DEFAULT_URL: Final = "sqlite:///penstock.db"


class StoreName(NamedTuple):
    """The store and the namespace that one place names, as far as it names them."""

    url: str | None = None
    namespace: str | None = None


def chosen_store(names: Iterable[StoreName]) -> tuple[str, str | None]:
    """Return the URL and the namespace that count, of ``names`` in the order of their rank.

    URL and namespace are chosen apart: the first that names one counts. A namespace in the chosen URL has the rank of
    that URL; then the namespace returned is ``None``, unless a higher rank names one.
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
    """Raise ``InvalidOption`` for a URL that cannot be that of a store, before anybody connects.

    It is not quoted, because it may hold a password.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise InvalidOption(
            "The first argument of App(...) is the URL of the store. What was given is not a URL: it has no scheme. "
            "Use one like sqlite:///penstock.db or valkey://host. An app has no name."
        )
    if remedy := FOREIGN_STORES.get(scheme.lower()):
        raise InvalidOption(f"{scheme}:// is not a store of Penstock. {remedy}.")
    if scheme.lower() == "sqlite" and urlsplit(url).netloc:
        raise InvalidOption(
            f"{shown(url)} names no file. Use three slashes for a relative path (sqlite:///penstock.db), four for "
            "an absolute one (sqlite:////var/lib/penstock.db)."
        )


def from_environment() -> StoreName:
    """Return what ``PENSTOCK_URL`` and ``PENSTOCK_NAMESPACE`` name."""
    return StoreName(os.environ.get("PENSTOCK_URL"), os.environ.get("PENSTOCK_NAMESPACE"))


def shown_store(url: str, namespace: str | None) -> str:
    """Return the store and the namespace for a log line or a screen, without passwords.

    A file is named by its absolute path: a relative one is another file in every folder.
    """
    part = namespace or _named_in(url) or "default"
    return f"{visible_in_line(without_password(_absolute(url)))}, namespace {part}"


def store_options(named: StoreName) -> tuple[str, ...]:
    """Return the options of a command that reaches the store which the code names.

    A URL with a password is left out: the reader has to set ``PENSTOCK_URL``. No command reaches ``memory://``.
    """
    if named.url is None or named.url.startswith("memory:"):
        return ()
    namespace = ("--namespace", named.namespace) if named.namespace else ()
    has_password = without_password(named.url) != named.url
    return namespace if has_password else ("--url", _absolute(named.url), *namespace)


def _absolute(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        return url
    path = quote(os.path.abspath(unquote(parts.path[1:])))
    return f"sqlite:///{path}?{parts.query}" if parts.query else f"sqlite:///{path}"


def _named_in(url: str) -> str:
    return parse_qs(urlsplit(url).query).get("namespace", [""])[0]


class Opening:
    """Made of the ``url`` of an app, or of an open storage, which stays its giver's to close (``is_ours`` is false)."""

    def __init__(self, given: str | Storage, *, namespace: str | None) -> None:
        self._storage = None if isinstance(given, str) else _checked_storage(given)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._namespace = namespace
        self.url = _shared_by_loops(given) if isinstance(given, str) else given.url
        self.is_ours = self._storage is None

    async def open(self) -> Storage:
        """A storage for the running loop, opened. Raises ``StorageError``, and ``InvalidOption`` for a URL that names
        no engine."""
        if self._storage is not None:
            return self._given(self._storage)
        from penstock.storage import open_storage

        options = {} if self._namespace is None else {"namespace": self._namespace}
        storage = open_storage(self.url, **options)
        await storage.open()
        return storage

    def _given(self, storage: Storage) -> Storage:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise StorageError(
                "the storage this app was given belongs to another event loop, where the app was used before. "
                "Give the app a URL instead: then every loop gets a connection of its own."
            )
        self._loop = loop
        return storage


def _checked_storage(given: Storage) -> Storage:
    if not hasattr(given, "capabilities"):
        raise InvalidOption(
            f"url={shown(given)} is of type {type(given).__qualname__}, and no store. "
            "Give a URL such as 'sqlite:///penstock.db', or an open storage."
        )
    return given


def _shared_by_loops(url: str) -> str:
    """An unnamed ``memory://`` gets a name, or every loop of the app would have a store to itself."""
    parts = urlsplit(url)
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return parts._replace(netloc=f"app-{uuid7()}").geturl()
    return url
