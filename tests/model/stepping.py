"""Durable steps in the model."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import CopyStepsAnswer, EventType, ResetAnswer, State, StepAnswer
from penstock.core.step import NewStep, Step
from tests.model.record import Record
from tests.model.steps import Steps

__all__ = ["Stepping"]

S, E = State, EventType


class Stepping(Steps):
    """What is recorded of the parts of a job."""

    def record_steps(self, steps: Sequence[NewStep], lease_ms: int) -> list[StepAnswer]:
        held = [self._held(step.id, step.token) for step in steps]
        answers: list[StepAnswer] = [
            "lost" if record is None else self._record(record, step)
            for record, step in zip(held, steps, strict=True)
        ]
        for record in held:
            if record is not None:
                if record.steps and not (record.extras and record.extras.has_steps):
                    record.extras = replace(record.extras or EMPTY_EXTRAS, has_steps=True)
                if lease_ms:
                    record.lease_until = max(record.lease_until, self.now + lease_ms)
        return answers

    def _record(self, record: Record, new: NewStep) -> StepAnswer:
        known = record.steps.get(new.name)
        if new.status == "unused":
            if known is None:
                return "known"
            self._append(E.RECORDED, record, token=record.token)
            return "recorded"
        if known is not None and known.is_final and not new.replaces:
            return "known"
        number = self._draw() if known is None else known.number
        until = self.now + new.delay_ms if new.delay_ms else 0
        record.steps[new.name] = Step(
            new.name, new.status, number, self.now, until, new.arguments, new.result, len(new.result), new.failures,
            new.failure,
        )  # fmt: skip
        self._append(E.RECORDED, record, token=record.token)
        return "recorded"

    def steps(self, id: str) -> list[Step]:
        record = self.records.get(id)
        return [] if record is None else record.recorded

    def reset_step(self, id: str, name: str) -> ResetAnswer:
        record = self.records.get(id)
        if record is None:
            return "not_found"
        if record.state is S.ACTIVE:
            return "active"
        if record.steps.pop(name, None) is None:
            return "unknown_step"
        self._append(E.CHANGED, record)
        return "reset"

    def copy_steps(self, id: str, to: str, before: str) -> CopyStepsAnswer:
        source, target = self.records.get(id), self.records.get(to)
        if source is None or target is None:
            return "not_found"
        if target.state is S.ACTIVE:
            return "active"
        steps = sorted(source.steps.values(), key=lambda step: step.number)
        firsts = [
            n for n, step in enumerate(steps) if step.name == before or step.name.startswith(f"{before}[")
        ]
        if not firsts:
            return "unknown_step"
        for step in steps[: firsts[0]]:
            number = self._draw()
            target.steps.setdefault(step.name, replace(step, number=number))
        if firsts[0]:
            target.extras = replace(target.extras or EMPTY_EXTRAS, has_steps=True)
        self._append(E.CHANGED, target)
        return "copied"

    def _forgive(self, record: Record) -> None:
        record.steps = {name: step for name, step in record.steps.items() if step.status == "completed"}
