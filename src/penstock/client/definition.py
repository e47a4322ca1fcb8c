"""The signatures of tasks and handlers, from their functions and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import astuple

from penstock.client.decorators import Batching, batch_signature, parse_batching
from penstock.client.signature import Signature
from penstock.core.text import shown
from penstock.errors import InvalidInput, InvalidOption

if TYPE_CHECKING:
    from penstock.client.codec import Serde
    from penstock.client.execution import Runner


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


def signature_of(
    func: Callable[..., Any], name: str, given: Mapping[str, Any], *, runner: Runner, takes_payload: bool
) -> tuple[Signature, Batching | None]:
    """Return the signature of one job of a function, and how its jobs are batched. Raise ``InvalidOption``."""
    takes_context = given.get("takes_context", False)
    batching = parse_batching(given.get("batch"), given.get("batch_wait"), where=f"task {shown(name)}")
    kind = PayloadSignature if takes_payload else Signature
    if batching is None:
        return kind.of(func, takes_context=takes_context), None
    return batch_signature(func, batching, runner=runner, takes_context=takes_context, kind=kind)
