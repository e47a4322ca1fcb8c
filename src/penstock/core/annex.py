"""What few jobs have beside the common: a group, a cost, headers, and what ties a job to others.

Engines keep it apart from a job's record, packed, and look at it only where it is there. It travels and is
stored as a MessagePack map under short names, which the Lua of the Valkey engine reads too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

__all__ = ["EMPTY_ANNEX", "Annex", "Dependent", "pack_annex", "unpack_annex"]


class Dependent(NamedTuple):
    """A job that is to be told of another's end, in the life that began with ``flow``."""

    queue: str
    id: str
    flow: str


class Annex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={
    "group": "g",
    "cost": "c",
    "headers": "h",
    "dedup": "d",
    "usage": "u",
    "scheduler": "s",
    "slot_ms": "t",
    "repeats": "r",
    "step": "st",
    "awaits": "sw",
    "awaits_until_ms": "su",
    "received": "sr",
    "timed_out": "so",
    "kept": "sk",
    "holds": "hd",
    "flow": "fl",
    "dependents": "dn",
    "has_later_dependents": "dl",
    "has_dependencies": "dp",
    "passes": "pr",
    "staged_delay_ms": "sd",
    "unknown_run": "ur",
}):  # fmt: skip
    """See the module. What is no **tie**: ``headers``, which are the user's and pass through untouched; ``usage``, what
    the job has reported (``core.usage``); ``scheduler`` and ``slot_ms``, where it comes from; ``step``, where it goes
    on. ``awaits`` (a signal, until ``awaits_until_ms``, 0: for ever), ``received``, ``timed_out`` and ``kept`` (how
    many signals came early) are of its suspensions; ``staged_delay_ms`` counts from the release of a staged job
    (``core.staging``). ``unknown_run`` is the last run whose worker did not know the task. All else is a tie:
    ``dedup`` is the key whose record goes when the job ends; ``repeats``: its scheduler waits for that end; ``holds``
    are consumers that keep a finished job, and for how many milliseconds after its end.

    ``flow`` names the flow a job came with. ``dependents`` are told of its end, with those in a list beside the
    annex if it ``has_later_dependents``. ``passes`` is for whoever runs the job: how results of its dependencies
    become arguments.

    The short names are a storage format: add, never reuse. No field may be an empty list or map once it is
    set: in Lua the two are the same. ``headers`` are packed first: they differ from job to job, and the Lua skips them
    to decode the rest only once (lua/shortcut.lua).
    """

    headers: dict[str, str] | None = None
    group: str = ""
    cost: int = 1
    dedup: str = ""
    usage: dict[str, int] | None = None
    scheduler: str = ""
    slot_ms: int = 0
    repeats: bool = False
    step: str = ""
    awaits: str = ""
    awaits_until_ms: int = 0
    received: str = ""
    timed_out: bool = False
    kept: int = 0
    holds: dict[str, int] | None = None
    flow: str = ""
    dependents: list[Dependent] | None = None
    has_later_dependents: bool = False
    has_dependencies: bool = False
    passes: str = ""
    staged_delay_ms: int = 0
    unknown_run: int = 0

    @property
    def binds(self) -> bool:
        """Whether the job's transitions concern others, or others it: then no engine may take a shortcut."""
        return self.group != "" or self.cost != 1 or self.binds_beyond_group

    @property
    def binds_beyond_group(self) -> bool:
        """Whether there is another tie than that to its group."""
        return (
            self.flow != ""
            or self.dedup != ""
            or self.holds is not None
            or self.repeats
            or self.dependents is not None
            or self.has_later_dependents
            or self.has_dependencies
            or self.passes != ""
        )

    def shed(self) -> Annex:
        """What of it a later life of the same id begins with: all that the user said, nothing that happened."""
        return Annex(group=self.group, cost=self.cost, headers=self.headers, holds=self.holds)

    @property
    def longest_hold_ms(self) -> int:
        """For how long after its end a job is held by its consumers; 0 if by none."""
        return max(self.holds.values()) if self.holds else 0


EMPTY_ANNEX: Final = Annex()
_NOTHING: Final = 3
"""Bytes of an empty map, in any of the ways to write it: one with an entry has more."""

pack_annex: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Annex).decode


def unpack_annex(packed: bytes) -> Annex | None:
    """The annex of these bytes; ``None`` if there is nothing in it."""
    return None if len(packed) <= _NOTHING else _decode(packed)
