"""Where a worker's probe listens, and who may ask it."""

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


# The probe of a worker: ``/healthz``, ``/readyz`` and ``/metrics`` over HTTP.
#
# | path | 200 | 503 | |---|---|---| | ``/healthz`` | the process lives and heartbeats go out | the
# worker's loop, or its heartbeat, has stopped | | ``/readyz`` | jobs are being consumed | they are not;
# the answer says why | | ``/metrics`` | Prometheus text; needs the extra ``penstock[metrics]`` | that is
# not installed |
#
# It answers from a thread of its own, so a handler that hogs the worker's loop does not silence it.


logger = get_logger("penstock.observe")

# A heartbeat is due every few seconds; one this late means that nobody renews the leases.
_SILENT_HEARTBEAT_S: Final = 60.0


class _Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"


class Probe:
    """Listens from ``start`` to ``close``. ``url`` says where."""

    def __init__(self, worker: Worker, address: ProbeAddress) -> None:
        self._worker = worker
        self._address = address
        self._server: WSGIServer | None = None
        self._exposition: Callable[[], tuple[bytes, str]] | None = None

    @property
    def url(self) -> str:
        """The address it has got, without a path."""
        assert self._server is not None, "not started"
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        return f"http://{host}:{self._server.server_port}"

    def start(self) -> None:
        """Listen. Raises ``InvalidOption`` if the address is taken or is not this machine's."""
        self._exposition = _exposition_of(self._worker)
        try:
            self._server = make_server(
                self._address.host, self._address.port, self._answer, _Server, handler_class=_Quiet
            )
        except OSError as error:
            raise InvalidOption(
                f"the probe cannot listen on {self._address.host}:{self._address.port}: {error.strerror}. "
                "Give another port, or 0 for any that is free."
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
            return _Answer(HTTPStatus.UNAUTHORIZED, b'{"error": "give the token: Authorization: Bearer ..."}')
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, b'{"error": "only GET"}')
        match environ["PATH_INFO"]:
            case "/healthz":
                return self._healthz()
            case "/readyz":
                return self._readyz()
            case "/metrics":
                return self._metrics()
            case _:
                return _Answer(HTTPStatus.NOT_FOUND, b'{"error": "there are /healthz, /readyz and /metrics"}')

    def _is_allowed(self, authorization: str) -> bool:
        wanted = f"Bearer {self._address.token}".encode()
        return not self._address.token or hmac.compare_digest(authorization.encode(), wanted)

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


class _Quiet(WSGIRequestHandler):
    """A line per probe is noise."""

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
