"""The verbs of durable steps, and the records that a lease carries (lua/steps.lua)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from penstock.core.lifecycle import CopyStepsAnswer, ResetAnswer, StepAnswer
from penstock.core.step import (
    SENT_RESULT,
    NewStep,
    Step,
    StepBody,
    StepStatus,
    event_data,
    pack_body,
    unpack_body,
)
from penstock.errors import StorageError
from penstock.storage.valkey.calls import Calls, Refused
from penstock.storage.valkey.commands import Arg
from penstock.storage.valkey.jobs import ANSWERS, UNREADABLE, letters_of
from penstock.storage.values import unreadable_step

_STATUSES: Final[dict[int, StepStatus]] = {
    ord(letter): status for letter, status in letters_of(StepStatus).items()
}
_LETTERS: Final = {status: letter.encode() for letter, status in letters_of(StepStatus, u="unused").items()}
_HEAD: Final = struct.Struct(">cHIHIHI")
_unpack_head: Final = _HEAD.unpack_from
_encode_json: Final = msgspec.json.Encoder().encode


class Steps:
    """The part of the engine that stores steps."""

    _calls: Calls

    async def record_steps(
        self, queue: str, steps: Sequence[NewStep], *, lease_ms: int = 0
    ) -> list[StepAnswer]:
        args: list[Arg] = [lease_ms]
        for step in steps:
            args += _arguments(step)
        letters: bytes = await self._calls.call_once(queue, "record_steps", args)
        return [ANSWERS["record_steps"][letter] for letter in letters.decode()]

    async def steps(self, queue: str, id: str, *, names: Sequence[str] | None = None) -> list[Step]:
        if names is not None and not names:
            return []
        try:
            reply = await self._calls.call(queue, "steps", id, *(names or ()))
            if names is None:
                return in_order(map(_step, reply[::2], reply[1::2]))
            found = in_order(map(_step, reply[::3], reply[1::3], reply[2::3]))
        except UNREADABLE:
            raise unreadable_step(queue, id) from None
        except Refused as error:
            raise _damage(queue, error) from None
        if any(step.result is None for step in found):
            raise unreadable_step(queue, id)
        return found

    async def reset_step(self, queue: str, id: str, name: str) -> ResetAnswer:
        data = _encode_json({"step": name})
        letter: bytes = await self._calls.call(queue, "reset_step", id, name, data)
        answer: ResetAnswer = ANSWERS["reset_step"][letter.decode()]
        return answer

    async def copy_steps(self, queue: str, id: str, to: str, *, before: str) -> CopyStepsAnswer:
        args = (id, to, before, _encode_json({"of": id})[1:-1])
        try:
            letter: bytes = await self._calls.call_once(queue, "copy_steps", args)
        except Refused as error:
            raise _damage(queue, error) from None
        answer: CopyStepsAnswer = ANSWERS["copy_steps"][letter.decode()]
        return answer


def _damage(queue: str, error: Refused) -> StorageError:
    """Return the error to raise: a refusal names the job whose steps cannot be read."""
    return unreadable_step(queue, error.text) if error.code == "STEP" else error


def _arguments(step: NewStep) -> tuple[Arg, ...]:
    size = len(step.result)
    head = b"%b%b%b%b%b%c" % (
        step.token.to_bytes(6, "big"),
        _LETTERS[step.status],
        step.delay_ms.to_bytes(6, "big"),
        step.run_ms.to_bytes(6, "big"),
        size.to_bytes(4, "big"),
        step.replaces,
    )
    failure = step.failure
    error = ("", "") if failure is None else (failure.type, failure.message)
    large = step.result if size > SENT_RESULT else b""
    return (step.id, head, step.name, pack_body(StepBody.of(step)), large, event_data(step), *error)


def _step(name: bytes, stored: bytes, large: bytes = b"") -> Step:
    status, n1, n2, a1, a2, u1, u2 = _unpack_head(stored)
    return unpack_body(stored[_HEAD.size :]).step(
        name.decode(),
        status=_STATUSES[status[0]],
        number=n1 << 32 | n2,
        at_ms=a1 << 32 | a2,
        until_ms=u1 << 32 | u2,
        large=large or None,
    )


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Return the steps in the order in which they were first recorded."""
    return sorted(steps, key=lambda step: step.number)


def read_sent_steps(packed: bytes, at: int) -> tuple[tuple[Step, ...], int]:
    """Return the steps in the details of a lease that begin at a place, and the place after them."""
    count = int.from_bytes(packed[at : at + 4], "big")
    at += 4
    steps: list[Step] = []
    for _ in range(count):
        name_at = at + 2
        length_at = name_at + int.from_bytes(packed[at:name_at], "big")
        stored_at = length_at + 4
        at = stored_at + int.from_bytes(packed[length_at:stored_at], "big")
        steps.append(_step(packed[name_at:length_at], packed[stored_at:at]))
    return tuple(in_order(steps)), at
