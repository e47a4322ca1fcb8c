"""The making of tasks and handlers from functions and their options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import astuple, replace

from penstock.client.codec import resolve_serde
from penstock.client.decorators import batch_signature, parse_batching
from penstock.client.execution import resolve_limits, resolve_retries, resolve_runner
from penstock.client.options import PLACEMENT, placed
from penstock.client.parsers import check_wait
from penstock.client.rules import task_rules
from penstock.client.signature import Signature
from penstock.client.task import FunctionTask, Task
from penstock.core.text import shown
from penstock.errors import InvalidInput, InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import Serde


class PayloadSignature(Signature):
    """The signature of a handler, whose only parameter, besides the context, is the whole payload."""

    __slots__ = ()

    @classmethod
    def of(cls, function: Callable[..., Any], *, takes_context: bool = False) -> Signature:
        """As ``Signature.of``. Raise ``InvalidOption`` unless the function takes one payload."""
        made = super().of(function, takes_context=takes_context)
        if len(made.parameters) != 1 or not made.takes_first:
            raise InvalidOption(
                f"{made.name} cannot be a handler: it needs one parameter for the payload, and may have one more, "
                f"annotated with JobContext. It has {len(made.parameters)}: {', '.join(made.parameters) or 'none'}."
            )
        # A flow passes results as arguments by name, and the payload has no names.
        return dataclasses.replace(made, takes_first=False)

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, serde: Serde) -> bytes:
        [value] = astuple(self.pack(args, kwargs))
        if problem := self.misfit(self.parameters[0], value, serde):
            raise InvalidInput(problem)
        return serde.encode(value)

    def unpack(
        self, data: bytes, serde: Serde, *, context: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = (serde.decode(data, self.fields[self.parameters[0]].type),)
        return (values, {}) if self._arrange is None else self._arrange(values, context)


def define(
    app: App,
    func: Callable[..., Any],
    *,
    name: str,
    queue: str,
    given: Mapping[str, Any],
    takes_payload: bool = False,
) -> Task[..., Any]:
    """Return the task for a function. With ``takes_payload``, its jobs have no task, and its parameter is the payload.

    Raises:
        InvalidOption: an invalid value, or a function that does not suit its options.
    """
    runner = resolve_runner(name, func, given.get("runner", "auto"))
    takes_context, where = given.get("takes_context", False), f"task {shown(name)}"
    batching = parse_batching(given.get("batch"), given.get("batch_wait"), where=where)
    kind = PayloadSignature if takes_payload else Signature
    if batching is None:
        signature = kind.of(func, takes_context=takes_context)
    else:
        signature, batching = batch_signature(
            func, batching, runner=runner, takes_context=takes_context, kind=kind
        )
    serde = app.serde if "serde" not in given else resolve_serde(given["serde"])
    result_serde = app.result_serde if "serde" not in given else serde
    rules = None if takes_payload else task_rules(name, given, signature)
    ruled = frozenset() if rules is None else rules.given.keys()
    fixed = {key: value for key, value in given.items() if key in PLACEMENT and key not in ruled}
    return FunctionTask(
        app,
        func,
        name=name,
        queue=queue,
        runner=runner,
        limits=resolve_limits(name, runner, given),
        serde=serde,
        result_serde=resolve_serde(given.get("result_serde", result_serde)),
        signature=signature,
        defaults=app.with_policy(replace(app.defaults, task="" if takes_payload else name), given),
        fields=placed(app.fields, fixed if rules is None else {**fixed, **rules.constants}),
        rules=rules,
        batching=batching,
        retries=resolve_retries(where, given.get("retry_on"), given.get("give_up_on")),
        wait=check_wait(given.get("wait", app.wait)),
    )
