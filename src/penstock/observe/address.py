"""Where a worker's probe listens, and who may ask it."""

from __future__ import annotations

import ipaddress
import os
from typing import Any, Final, NamedTuple

from penstock.core.display import shown
from penstock.errors import InvalidOption

__all__ = ["TOKEN_VARIABLE", "ProbeAddress", "read_address"]

TOKEN_VARIABLE: Final = "PENSTOCK_PROBE_TOKEN"


class ProbeAddress(NamedTuple):
    """``port`` 0 is any free one. ``token`` is what askers must present; empty if none is needed."""

    host: str
    port: int
    token: str = ""

    def __repr__(self) -> str:
        return f"ProbeAddress({shown(self.host)}, {self.port})"

    def moved(self, by: int) -> ProbeAddress:
        """The address of the worker process with that number: ports that follow each other."""
        return self._replace(port=self.port + by if self.port else 0)


def read_address(given: Any, *, token: Any = None) -> ProbeAddress:
    """Read ``"9100"``, ``"127.0.0.1:9100"`` or ``"[::1]:9100"``; without a host it is the loopback's.

    The token may come from the environment's ``PENSTOCK_PROBE_TOKEN``.

    Raises:
        InvalidOption: no port, or an address beyond the loopback without a token.
    """
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise InvalidOption(
            f"probe={shown(given)} names no port. Give one, such as '9100' or '127.0.0.1:9100'."
        )
    token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise InvalidOption(
            "probe_token must be a text of printable ASCII characters, which HTTP headers take."
        )
    if not token and not _is_loopback(host):
        raise InvalidOption(
            f"probe={shown(given)} would be open to others without a token. Give probe_token=..., or set "
            f"{TOKEN_VARIABLE}; or listen on 127.0.0.1 only."
        )
    return ProbeAddress(host, int(port), token)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
