"""The Lua scripts of the bridge: each is one atomic step. The keys they use are told in ``lua/prelude.lua``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any, Final, Literal, TypeAlias

from penstock.storage.valkey.command import Again, Arg
from penstock.storage.valkey.router import ReplyError, Router

__all__ = ["Script", "Verb", "run_script", "script"]

Verb: TypeAlias = Literal["add", "complete", "lengths", "reclaim", "take", "tidy"]

# Under memory pressure nothing new comes in, and what is there can still be worked off.
_FLAGS: Final[dict[Verb, str]] = {"add": "", "lengths": "flags=no-writes"}


@dataclass(frozen=True, slots=True)
class Script:
    """``code`` is what EVAL takes; ``sha`` names it for EVALSHA."""

    code: str
    sha: str


@cache
def script(verb: Verb) -> Script:
    """The script of a verb: its file behind the prelude."""
    folder = resources.files(__package__) / "lua"
    files = [(folder / f"{name}.lua").read_text("utf-8") for name in ("prelude", verb)]
    code = "\n".join([f"#!lua {_FLAGS.get(verb, 'flags=allow-oom')}".rstrip(), *files])
    return Script(code, hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest())


async def run_script(
    router: Router,
    verb: Verb,
    *,
    keys: tuple[bytes, ...],
    args: Sequence[Arg],
    again: Again | None = None,
) -> Any:
    """Run a script where its keys are, sending its text only if the server does not have it.

    Repeated as ``Router.call`` says; ``again`` gives the arguments of a repeat. Raises ``StorageError``.
    """
    wanted, now = script(verb), args

    def repeat(*start: str) -> Sequence[Arg]:
        nonlocal now
        now = now if again is None else again()
        return (*start, len(keys), *keys, *now)

    for start in (("EVALSHA", wanted.sha), ("EVAL", wanted.code)):
        command: Sequence[Arg] = (*start, len(keys), *keys, *now)
        try:
            return await router.call(keys[0], *command, again=partial(repeat, *start))
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
    raise AssertionError("EVAL needs no script to be there")
