"""Calls of the library's functions: retries, streams, error replies; and servers that were restarted or replaced.

A queue keeps the run id of the server that it was used on (``recognise`` in ``lua/renew_epoch.lua``). A process sends
the server's run id before its first call, and again on a new connection to another server, before any call uses that
connection. If the two differ, fencing tokens jump ahead, so that none is given out twice even if writes were lost. The
epoch changes if writes may have been lost: the server was a replica of the earlier one, it started from a snapshot, or
this process has seen more than there is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from penstock.core.text import get_logger
from penstock.errors import StorageDamaged, StorageError, StorageRefused, StorageUnavailable, StorageVersion
from penstock.storage.valkey.commands import Arg, Caller, ReplyError, Router, Server, check_server
from penstock.storage.valkey.jobs import learn
from penstock.storage.valkey.library import Keys, Library, library
from penstock.storage.valkey.repair import AT_MOST, Repair
from penstock.storage.values import Ticket

_log: Final = get_logger("penstock.storage")
_warned: Final[set[str]] = set()  # run ids of servers

_REPEATED: Final = b"1"
_FIRST: Final = b"0"
_ROUNDS: Final = AT_MOST + 2
_PROMISES: Final = frozenset({"enqueue", "enqueue_flows", "attach", "settle", "record_steps"})
"""Verbs whose answer promises to keep a job, a result or a step: with ``replicas``, they wait for that many."""
_LOADS: Final = 3  # of the library in one call: the slot may move to another server that lacks it


class Refused(StorageError):
    """A function refused, and wrote nothing. ``code`` is the reason; ``text`` is for people, or an id."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Calls:
    """The calls of one client to one namespace."""

    def __init__(
        self,
        router: Router,
        keys: Keys,
        *,
        servers: KnownServers | None = None,
        functions: Library | None = None,
        replicas: int = 0,
    ) -> None:
        self.keys = keys
        self.router = router
        self.library = functions or library()
        self._servers = servers
        self.replicas = replicas
        self._recognised: set[str] = set()
        self._names: dict[str, str] = {}
        self._process = secrets.token_hex(6)
        self._streams = 0
        self._free: list[tuple[str, int]] = []
        self.repair = Repair(keys, run=self.call_as_it_is, plain=self.plain)

    async def call(self, queue: str, verb: str, *args: Arg, ids: Sequence[Arg] = ()) -> Any:
        """Run a verb's function, which must be safe to repeat.

        ``ids``: the jobs it is about; one that cannot be read is put aside.
        """
        key, meta = self.keys.declared(queue)
        return await self._send(queue, key, ("FCALL", self._name(verb), 2, key, meta, *args), ids=ids)

    async def call_counted(self, queue: str, verb: str, *args: Arg) -> tuple[Any, int]:
        """Run a verb's function as ``call`` does. Also return how many damaged records were put aside."""
        counted: list[int] = []
        key, meta = self.keys.declared(queue)
        command = ("FCALL", self._name(verb), 2, key, meta, *args)
        return await self._send(queue, key, command, counted=counted), sum(counted)

    async def call_as_it_is(self, queue: str, verb: str, *args: Arg) -> Any:
        """Run a verb's function, and repair nothing. Raises ``StorageDamaged`` if it meets damaged data."""
        key, meta = self.keys.declared(queue)
        try:
            return await self._attempt(key, ("FCALL", self._name(verb), 2, key, meta, *args))
        except Refused as error:
            raise _unreadable(queue, error) if error.code == "DAMAGED" else error from None

    async def call_once(
        self, queue: str, verb: str, args: Sequence[Arg], *, ticket: Ticket | None = None
    ) -> Any:
        """Run a verb's function at most once: a repetition is marked as one, and gets the first answer."""
        key, meta = self.keys.declared(queue)
        head = ("FCALL", self._name(verb), 2, key, meta)
        replicas = self.replicas if self.replicas and verb in _PROMISES else 0
        if ticket is not None:
            command = (*head, ticket.stream, ticket.number, _REPEATED, *args)
            return await self._send(queue, key, command, replicas=replicas)
        stream, number = self._free.pop() if self._free else self._new_stream()
        number += 1
        reply = await self._send(
            queue,
            key,
            (*head, stream, number, _FIRST, *args),
            again=lambda: (*head, stream, number, _REPEATED, *args),
            replicas=replicas,
        )
        # Only now: a call that failed or was cancelled may still be running, so its stream is not used again.
        self._free.append((stream, number))
        return reply

    async def call_behind(
        self, queue: str, command: Sequence[Arg], verb: str, args: Sequence[Arg], *, timeout_ms: int
    ) -> Any:
        """Run a verb's function the moment a blocking ``command`` ends. If the connection is lost, do not repeat it: it
        may have run."""
        if queue not in self._recognised:
            await self._recognise(queue)
        key, meta = self.keys.declared(queue)
        stream, number = self._free.pop() if self._free else self._new_stream()
        number += 1
        head = ("FCALL", self._name(verb), 2, key, meta, stream, number)
        try:
            reply = await self.router.call_blocking(
                key,
                *command,
                timeout=timeout_ms / 1000,
                then=(*head, _FIRST, *args),
                again=lambda: (*head, _REPEATED, *args),
            )
        except ReplyError as error:
            if "Function not found" not in str(error):
                meaning = _meaning(error)
                if not (isinstance(meaning, Refused) and meaning.code == "DAMAGED"):
                    raise meaning from None
            return await self.call_once(queue, verb, args)
        self._free.append((stream, number))
        return reply

    def warn_of_servers(self) -> None:
        """Log risks in how the servers store jobs, once per process and server."""
        if self._servers is not None:
            self._servers.warn()

    async def check_rights(self, queue: str) -> None:
        """Raise ``StorageRefused`` if the user may not run every command of the functions on the queue's keys."""
        missing = await self.call(queue, "rights", *self.library.commands)
        if missing:
            names = ", ".join(name.decode() for name in missing)
            raise StorageRefused(
                f"this user may not run {names} on the keys of queue {queue!r}. Nothing was written. "
                "Give the user all rights that Penstock needs: docs/stores.md has the ACL rule"
            )

    async def learn_options(self, queue: str) -> None:
        """Learn all headers of the queue, because a record refers to options that this process does not know."""
        key = self.keys.part(queue, "options")
        rows = await self.plain(key, "HGETALL", key)
        for reference, header in zip(rows[::2], rows[1::2], strict=True):
            with suppress(msgspec.DecodeError):  # Jobs with these options are damaged.
                learn(reference, header)

    async def blocking(self, queue: str, *command: Arg, timeout_ms: int) -> Any:
        """Run a command that may block for ``timeout_ms``."""
        return await self.router.call_blocking(self.keys.of(queue), *command, timeout=timeout_ms / 1000)

    async def plain(self, key: bytes, *command: Arg) -> Any:
        """Run a plain command of the server on one key."""
        return await self.router.call(key, *command)

    async def _recognise(self, queue: str) -> None:
        """Tell the queue, before its first call, which server it is on. It may have been used on another one."""
        if self._servers is not None:
            caller = _NodeOf(self.router, self.keys.of(queue))
            await self._servers.recognise(caller, queue, await check_server(caller))
        self._recognised.add(queue)

    async def _send(
        self,
        queue: str,
        key: bytes,
        command: tuple[Arg, ...],
        *,
        again: Any = None,
        ids: Sequence[Arg] = (),
        counted: list[int] | None = None,
        replicas: int = 0,
    ) -> Any:
        """Run a function. If it meets damaged data, have that put aside and run it again."""
        if queue not in self._recognised:
            await self._recognise(queue)
        for _ in range(_ROUNDS + len(ids)):
            try:
                return await self._attempt(key, command, again=again, replicas=replicas)
            except Refused as error:
                if error.code != "DAMAGED":
                    raise
                refused = error
            repaired = await self.repair.mend(queue, ids)
            if repaired is None:
                break
            if counted is not None:
                counted.append(repaired)
        raise _unreadable(queue, refused)

    async def _attempt(
        self, key: bytes, command: tuple[Arg, ...], *, again: Any = None, replicas: int = 0
    ) -> Any:
        for _ in range(_LOADS):
            try:
                if replicas:
                    return await self.router.call_replicated(key, *command, replicas=replicas, again=again)
                return await self.router.call(key, *command, again=again)
            except ReplyError as error:
                if "Function not found" not in str(error):
                    raise _meaning(error) from None
            # FUNCTION FLUSH, a failover to a replica that never had the library, or a slot that moved to a new node:
            # nothing was carried out.
            await self.library.load(_NodeOf(self.router, key))
        raise StorageError(
            "the server does not keep the function library. Find out what keeps deleting it (FUNCTION FLUSH?)"
        )

    def _name(self, verb: str) -> str:
        name = self._names.get(verb)
        if name is None:
            name = self._names[verb] = self.library.function(verb)
        return name

    def _new_stream(self) -> tuple[str, int]:
        self._streams += 1
        return f"{self._process}:{self._streams}", 0


class _NodeOf:
    """The server of a key, as a Caller."""

    def __init__(self, router: Router, key: bytes) -> None:
        self._router = router
        self._key = key

    async def call(self, *command: Arg) -> Any:
        # Without REPLACE, which would discard the compiled library that other clients use.
        return await self._router.call(self._key, *command)


def _meaning(error: ReplyError) -> StorageError:
    if error.code != "PENSTOCK":
        return error
    code, _, text = error.message.partition(" ")
    text = text.partition(" script: ")[0]
    if code == "VERSION":
        return StorageVersion(f"{text}. Update Penstock here; a newer release wrote this data")
    if code == "TORN":
        return StorageDamaged(
            f"{text}. Nothing was written. Run `penstock doctor --repair`, which rebuilds the counters from the jobs"
        )
    if code == "KEY":
        midway, _, reason = text.partition(" ")
        written = "Nothing was written" if midway == "0" else "Part of the call may have been written"
        return StorageDamaged(
            f"{reason}: something else wrote to it. {written}. Run `penstock doctor --repair`, which deletes that key "
            "and repairs the rest"
        )
    if code == "META":
        return StorageDamaged(
            f"the counters of the queue cannot be read ({text}). Nothing was written. Run "
            "`penstock doctor --repair`, which rebuilds them from the jobs"
        )
    return Refused(code, text)


def _unreadable(queue: str, error: Refused) -> StorageDamaged:
    return StorageDamaged(
        f"queue {queue!r}: stored data cannot be read, and none of it could be put aside ({error.text}). Run "
        "`penstock doctor --repair`"
    )


class KnownServers:
    """The servers on which one process has used its queues. ``seen`` returns the highest number and the highest event
    of a queue that the process has seen."""

    def __init__(self, keys: Keys, functions: Library, *, seen: Callable[[str], tuple[int, int]]) -> None:
        self._keys = keys
        self._library = functions
        self._seen = seen
        self._servers: dict[str, str] = {}
        self._connected: dict[str, Server] = {}

    async def prepare(self, caller: Caller) -> None:
        """Prepare a new connection: check the server's version, load the library, and recognise the known queues."""
        server = await check_server(caller)
        self._connected[server.run_id] = server
        await self._library.ensure(caller)
        moved = [queue for queue, known in self._servers.items() if not known.startswith(server.run_id)]
        # A node of a cluster answers for its own queues. The others wait for a connection to theirs.
        await asyncio.gather(*(self.recognise(caller, queue, server) for queue in moved))

    def warn(self) -> None:
        """Log risks in how the servers store jobs, once per process and server."""
        for run_id, server in self._connected.items():
            if run_id not in _warned:
                _warned.add(run_id)
                _log_risks(server)

    async def recognise(self, caller: Caller, queue: str, server: Server) -> None:
        """Tell a queue which server it is on. The call that follows handles an error reply."""
        known, (seq, events) = self._servers.get(queue, ""), self._seen(queue)
        here = server.run_id + server.history
        began_ms = server.up_ms if server.from_snapshot else -1
        args: list[Arg] = [server.run_id, server.history, server.earlier, began_ms, known, seq, events]
        function = self._library.function("recognise")
        try:
            renewed = await caller.call("FCALL", function, 2, *self._keys.declared(queue), *args)
        except StorageUnavailable:
            raise
        except StorageError:
            return
        self._servers[queue] = here
        if renewed:
            _log.warning("queue %r may have lost its last writes: its event log begins a new epoch", queue)


def _log_risks(server: Server) -> None:
    if not server.appends:
        _log.warning(
            "the %s server has no append-only file: if it dies, accepted jobs and results are lost. "
            "Set 'appendonly yes'",
            server.name,
        )
    if server.eviction != "noeviction":
        _log.warning(
            "the %s server deletes jobs when its memory is full (maxmemory-policy %s). "
            "Set 'maxmemory-policy noeviction'",
            server.name,
            server.eviction,
        )
