"""The probe of a worker: ``/healthz``, ``/readyz`` and ``/metrics`` over HTTP.

| path | 200 | 503 |
|---|---|---|
| ``/healthz`` | the process lives and sends heartbeats | the worker's loop, or its heartbeat, has stopped |
| ``/readyz`` | the worker consumes jobs | it does not; the answer says why |
| ``/metrics`` | Prometheus text; needs the extra ``penstock[metrics]`` | the extra is not installed |

The probe answers from its own thread, so a handler that blocks the worker's loop does not silence it.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec

from penstock.core.text import get_logger, shown
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.worker.worker import Worker


logger = get_logger("penstock.observe")

TOKEN_VARIABLE: Final = "PENSTOCK_PROBE_TOKEN"
# A heartbeat is due every few seconds. If it is this late, the leases are not renewed.
_SILENT_HEARTBEAT_S: Final = 60.0


class ProbeAddress(NamedTuple):
    """The address of a probe. ``port`` 0 means any free port. Clients must send ``token``, unless it is empty."""

    host: str
    port: int
    token: str = ""

    def __repr__(self) -> str:
        return f"ProbeAddress({shown(self.host)}, {self.port})"

    def moved(self, by: int) -> ProbeAddress:
        """Return the address of worker process number ``by``. The processes have consecutive ports."""
        return self._replace(port=self.port + by if self.port else 0)


def read_address(address: Any, *, token: Any = None) -> ProbeAddress:
    """Read ``"9100"``, ``"127.0.0.1:9100"`` or ``"[::1]:9100"``. The default host is the loopback.

    The token may come from the environment variable ``PENSTOCK_PROBE_TOKEN``.

    Raises:
        InvalidOption: the port is missing, or the address is beyond the loopback and has no token.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise InvalidOption(
            f"probe must name a port, such as '9100' or '127.0.0.1:9100', got {shown(address)}."
        )
    token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise InvalidOption(
            "probe_token must be text of printable ASCII characters, because HTTP headers take no others."
        )
    if not token and not _is_loopback(host):
        raise InvalidOption(
            f"probe={shown(address)} would be open to other machines without a token. Give probe_token=..., set "
            f"{TOKEN_VARIABLE}, or listen on 127.0.0.1 only."
        )
    return ProbeAddress(host, int(port), token)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"


class Probe:
    """Listens on ``url`` from ``start`` to ``close``."""

    def __init__(self, worker: Worker, address: ProbeAddress) -> None:
        self._worker = worker
        self._address = address
        self._server: WSGIServer | None = None
        self._exposition: Callable[[], tuple[bytes, str]] | None = None

    @property
    def url(self) -> str:
        """Return the URL of the probe, without a path."""
        assert self._server is not None, "not started"
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        return f"http://{host}:{self._server.server_port}"

    def start(self) -> None:
        """Listen. Raise ``InvalidOption`` if the address is taken or does not belong to this machine."""
        self._exposition = _exposition_of(self._worker)
        try:
            self._server = make_server(
                self._address.host, self._address.port, self._answer, _Server, handler_class=_QuietHandler
            )
        except OSError as error:
            raise InvalidOption(
                f"the probe cannot listen on {self._address.host}:{self._address.port}: {error.strerror}. "
                "Give another port, or 0 for any free port."
            ) from error
        thread = threading.Thread(target=self._server.serve_forever, name="penstock-probe", daemon=True)
        thread.start()
        logger.info("the probe of worker %s listens on %s", self._worker.id, self.url)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer = self._answer_to(environ)
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [answer.body]

    def _answer_to(self, environ: dict[str, Any]) -> _Answer:
        if not self._is_allowed(environ.get("HTTP_AUTHORIZATION", "")):
            return _Answer(HTTPStatus.UNAUTHORIZED, b'{"error": "send the token: Authorization: Bearer ..."}')
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, b'{"error": "use GET"}')
        match environ["PATH_INFO"]:
            case "/healthz":
                return self._healthz()
            case "/readyz":
                return self._readyz()
            case "/metrics":
                return self._metrics()
            case _:
                return _Answer(HTTPStatus.NOT_FOUND, b'{"error": "use /healthz, /readyz or /metrics"}')

    def _is_allowed(self, authorization: str) -> bool:
        expected = f"Bearer {self._address.token}".encode()
        return not self._address.token or hmac.compare_digest(authorization.encode(), expected)

    def _healthz(self) -> _Answer:
        health = self._worker.health()
        lives = health.state != "stopped" and health.last_heartbeat_age_s < _SILENT_HEARTBEAT_S
        return _json(lives, {"state": health.state, "last_heartbeat_age_s": health.last_heartbeat_age_s})

    def _readyz(self) -> _Answer:
        health = self._worker.health()
        return _json(health.consuming, {"state": health.state, "reason": health.reason})

    def _metrics(self) -> _Answer:
        if self._exposition is None:
            text = b'{"error": "prometheus-client is not installed. Install penstock[metrics]."}'
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, text)
        body, content_type = self._exposition()
        return _Answer(HTTPStatus.OK, body, content_type)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Logs requests at debug level, because a line per probe is noise."""

    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _json(is_well: bool, facts: dict[str, Any]) -> _Answer:
    status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
    return _Answer(status, msgspec.json.encode({"ok": is_well, **facts}))


def _exposition_of(worker: Worker) -> Callable[[], tuple[bytes, str]] | None:
    try:
        from penstock.observe.prometheus import exposition
    except ImportError:
        return None
    return exposition(worker)
