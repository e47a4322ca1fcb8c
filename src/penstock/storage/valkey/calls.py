"""Calling functions of the library: names, lanes, and what an error reply means."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from penstock.errors import StorageDamaged, StorageError, StorageRefused, StorageVersion
from penstock.storage.valkey.identity import Identity
from penstock.storage.valkey.jobs import learn
from penstock.storage.valkey.library import Keys, Library, library
from penstock.storage.valkey.mending import AT_MOST, Mending
from penstock.storage.valkey.replies import Arg, ReplyError, check_server
from penstock.storage.valkey.routers import Router
from penstock.storage.values import Ticket

_REPEATED: Final = b"1"
_FIRST: Final = b"0"
_ROUNDS: Final = AT_MOST + 2
_PROMISES: Final = frozenset({"enqueue", "enqueue_flows", "attach", "settle"})
"""Verbs whose answer promises that a job or a result is kept: with ``replicas`` they wait for these."""
_LOADS: Final = 3  # of the library in one call: the slot may move on to a server that lacks it, too


class Refused(StorageError):
    """A function said no, and wrote nothing. ``code`` says why; ``text`` is for people, or the id concerned."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Calls:
    """One client's calls to one namespace. ``keys`` names what they are about."""

    def __init__(
        self,
        router: Router,
        keys: Keys,
        *,
        identity: Identity | None = None,
        functions: Library | None = None,
        replicas: int = 0,
    ) -> None:
        self.keys = keys
        self.router = router
        self.library = functions or library()
        self._identity = identity
        self.replicas = replicas
        self._met: set[str] = set()
        self._names: dict[str, str] = {}
        self._process = secrets.token_hex(6)
        self._lanes = 0
        self._free: list[tuple[str, int]] = []
        self.mending = Mending(keys, run=self.call_as_it_is, plain=self.plain)

    async def call(self, queue: str, verb: str, *args: Arg, ids: Sequence[Arg] = ()) -> Any:
        """Run a verb's function. Safe to be repeated: it does not matter whether it was carried out before.

        ``ids``: the jobs it is about; if one of them cannot be read, it is put aside.
        """
        key, meta = self.keys.declared(queue)
        return await self._send(queue, key, ("FCALL", self._name(verb), 2, key, meta, *args), ids=ids)

    async def call_counted(self, queue: str, verb: str, *args: Arg) -> tuple[Any, int]:
        """Run a verb's function as ``call`` does; say, too, how many damaged records were put aside for it."""
        counted: list[int] = []
        key, meta = self.keys.declared(queue)
        command = ("FCALL", self._name(verb), 2, key, meta, *args)
        return await self._send(queue, key, command, counted=counted), sum(counted)

    async def call_as_it_is(self, queue: str, verb: str, *args: Arg) -> Any:
        """Run a verb's function, and mend nothing. Raises ``StorageDamaged`` if it cannot read what it finds."""
        key, meta = self.keys.declared(queue)
        try:
            return await self._attempt(key, ("FCALL", self._name(verb), 2, key, meta, *args))
        except Refused as error:
            raise _unreadable(queue, error) if error.code == "DAMAGED" else error from None

    async def call_once(
        self, queue: str, verb: str, args: Sequence[Arg], *, ticket: Ticket | None = None
    ) -> Any:
        """Run a verb's function at most once: a repetition is marked as such, and gets the first answer."""
        key, meta = self.keys.declared(queue)
        head = ("FCALL", self._name(verb), 2, key, meta)
        replicas = self.replicas if self.replicas and verb in _PROMISES else 0
        if ticket is not None:
            command = (*head, ticket.lane, ticket.number, _REPEATED, *args)
            return await self._send(queue, key, command, replicas=replicas)
        lane, number = self._free.pop() if self._free else self._new_lane()
        number += 1
        reply = await self._send(
            queue,
            key,
            (*head, lane, number, _FIRST, *args),
            again=lambda: (*head, lane, number, _REPEATED, *args),
            replicas=replicas,
        )
        # Only now: a call that failed or was given up may still be under way, and its lane is left alone.
        self._free.append((lane, number))
        return reply

    async def call_behind(
        self, queue: str, command: Sequence[Arg], verb: str, args: Sequence[Arg], *, timeout_ms: int
    ) -> Any:
        """Run a verb's function the moment a blocking ``command`` ends. Not repeated if the connection is lost:
        then it may have run."""
        if queue not in self._met:
            await self._meet(queue)
        key, meta = self.keys.declared(queue)
        lane, number = self._free.pop() if self._free else self._new_lane()
        number += 1
        head = ("FCALL", self._name(verb), 2, key, meta, lane, number)
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
        self._free.append((lane, number))
        return reply

    def warn_of_servers(self) -> None:
        """Log what is wrong with how the servers keep jobs: once per process and server."""
        if self._identity is not None:
            self._identity.warn()

    async def check_rights(self, queue: str) -> None:
        """Raises ``StorageRefused`` if the user may not do all that the functions do to the queue's keys."""
        missing = await self.call(queue, "rights", *self.library.commands)
        if missing:
            names = ", ".join(name.decode() for name in missing)
            raise StorageRefused(
                f"this user may not run {names} on the keys of queue {queue!r}. Nothing was written. "
                "Give the user all rights that Penstock needs: docs/stores.md has the ACL rule"
            )

    async def learn_options(self, queue: str) -> None:
        """Read all headers of the queue: a record refers to options that this process has not met."""
        key = self.keys.part(queue, "options")
        rows = await self.plain(key, "HGETALL", key)
        for reference, header in zip(rows[::2], rows[1::2], strict=True):
            with suppress(msgspec.DecodeError):  # Jobs with these options are damaged.
                learn(reference, header)

    async def blocking(self, queue: str, *command: Arg, timeout_ms: int) -> Any:
        """A command that may block for ``timeout_ms``."""
        return await self.router.call_blocking(self.keys.of(queue), *command, timeout=timeout_ms / 1000)

    async def plain(self, key: bytes, *command: Arg) -> Any:
        """A command of the server's own, on one key."""
        return await self.router.call(key, *command)

    async def _meet(self, queue: str) -> None:
        """Before the first call: the queue may have been used on another server, or in another life of this one."""
        if self._identity is not None:
            caller = _NodeOf(self.router, self.keys.of(queue))
            await self._identity.recognise(caller, queue, await check_server(caller))
        self._met.add(queue)

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
        """Run a function; if it cannot read what it finds, have that put aside and run it again."""
        if queue not in self._met:
            await self._meet(queue)
        for _ in range(_ROUNDS + len(ids)):
            try:
                return await self._attempt(key, command, again=again, replicas=replicas)
            except Refused as error:
                if error.code != "DAMAGED":
                    raise
                refused = error
            mended = await self.mending.mend(queue, ids)
            if mended is None:
                break
            if counted is not None:
                counted.append(mended)
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
            # FUNCTION FLUSH, a failover to a replica that never saw it, or a slot that went to a new node: nothing
            # was carried out.
            await self.library.load(_NodeOf(self.router, key))
        raise StorageError(
            "the server does not keep the function library: something deletes it again and again"
        )

    def _name(self, verb: str) -> str:
        name = self._names.get(verb)
        if name is None:
            name = self._names[verb] = self.library.function(verb)
        return name

    def _new_lane(self) -> tuple[str, int]:
        self._lanes += 1
        return f"{self._process}:{self._lanes}", 0


class _NodeOf:
    """The server of a key as a caller."""

    def __init__(self, router: Router, key: bytes) -> None:
        self._router = router
        self._key = key

    async def call(self, *command: Arg) -> Any:
        # REPLACE would do no harm either, but would throw away the compiled library of everybody else.
        return await self._router.call(self._key, *command)


def _meaning(error: ReplyError) -> StorageError:
    if error.code != "PENSTOCK":
        return error
    code, _, text = error.message.partition(" ")
    text = text.partition(" script: ")[0]
    if code == "VERSION":
        return StorageVersion(f"{text}. Update Penstock here; it was updated elsewhere")
    if code == "TORN":
        return StorageDamaged(
            f"{text}. Nothing was written. Run `penstock doctor --repair`, which makes the counters anew from the jobs"
        )
    if code == "KEY":
        midway, _, said = text.partition(" ")
        written = "Nothing was written" if midway == "0" else "Part of the call may have been written"
        return StorageDamaged(
            f"{said}: something else wrote to it. {written}. Run `penstock doctor --repair`, which deletes that key "
            "and mends the rest"
        )
    if code == "META":
        return StorageDamaged(
            f"the counters of the queue cannot be read ({text}). Nothing was written. Run "
            "`penstock doctor --repair`, which makes them anew from the jobs"
        )
    return Refused(code, text)


def _unreadable(queue: str, error: Refused) -> StorageDamaged:
    return StorageDamaged(
        f"queue {queue!r}: stored data cannot be read, and none of it could be put aside ({error.text}). Run "
        "`penstock doctor --repair`"
    )
