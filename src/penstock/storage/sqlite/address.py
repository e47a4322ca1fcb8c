"""The URLs of the SQLite engine."""

from __future__ import annotations

from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from penstock.core.names import check_namespace
from penstock.core.text import shown
from penstock.core.units import milliseconds
from penstock.errors import InvalidOption
from penstock.storage.sqlite.connection import MEMORY

_DEFAULT_NAMESPACE = "default"
_DEFAULT_TIMEOUT_S = 30.0


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a storage's data. ``timeout_s`` is how long a call waits for another process's lock."""

    shown: str
    path: str
    memory_name: str = ""
    namespace: str = _DEFAULT_NAMESPACE
    timeout_s: float = _DEFAULT_TIMEOUT_S

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY

    @classmethod
    def parse(cls, url: str, *, namespace: str | None = None) -> Self:
        """Read ``sqlite:///path?namespace=prod&timeout=5s`` or ``memory://name``. ``namespace`` overrides the
        URL's."""
        parts = urlsplit(url)
        options = _options(url, parts.query)
        chosen = namespace or options.get("namespace", _DEFAULT_NAMESPACE)
        timeout_s = (
            milliseconds(options["timeout"], what="timeout") / 1000
            if "timeout" in options
            else _DEFAULT_TIMEOUT_S
        )
        return cls(
            shown=url,
            path=MEMORY if parts.scheme == "memory" else _path(url, parts.netloc, parts.path),
            memory_name=unquote(parts.netloc + parts.path) if parts.scheme == "memory" else "",
            namespace=check_namespace(chosen),
            timeout_s=timeout_s,
        )


def _options(url: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in ("namespace", "timeout"):
            raise InvalidOption(f"{shown(url)}: unknown option {shown(name)}. Use namespace or timeout.")
    return options


def _path(url: str, netloc: str, path: str) -> str:
    if netloc or not path.strip("/"):
        raise InvalidOption(
            f"{shown(url)} names no file. Use three slashes for a relative path (sqlite:///penstock.db), four for an"
            " absolute one (sqlite:////var/lib/penstock.db), memory:// for none."
        )
    return unquote(path[1:])
