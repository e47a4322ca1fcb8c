"""The location of a Valkey or Redis store, parsed from its URL. No I/O except reading TLS files.

::

    valkey://user:password@host:6379/0?namespace=shop      one server            (valkeys:// with TLS)
    valkey+unix:///run/valkey.sock?db=0                     one server, by socket
    valkey+cluster://host1:6379,host2:6379                  a cluster, by some of its nodes
    valkey+sentinel://host1:26379,host2:26379/service/0     the primary that the sentinels call ``service``

``redis``, ``rediss``, ``redis+cluster`` and so on mean the same. User and password are percent-decoded. No repr, log
line or error message shows a password, or any part of a URL that could belong to one.
"""

from __future__ import annotations

import difflib
import math
import re
import ssl
from dataclasses import dataclass, field, replace
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote

from penstock.core.text import shown
from penstock.errors import InvalidOption

Topology = Literal["standalone", "cluster", "sentinel"]

OPTIONS: Final = (
    "connect_timeout", "db", "namespace", "replicas", "sentinel_password", "sentinel_username", "ssl_ca_certs",
    "ssl_certfile", "ssl_check_hostname", "ssl_keyfile",
)  # fmt: skip
_SCHEME: Final = re.compile(r"(?P<base>valkeys?|rediss?)(\+(?P<kind>cluster|sentinel|unix))?\Z")
_HOST: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<name>[^:\[\]@\s]*))(?::(?P<port>[0-9]{1,5}))?\Z"
)
_ENCODE: Final = "Percent-encode '@', '/', '?', '#' and ':' in user names and passwords."


@dataclass(frozen=True, slots=True)
class Address:
    """One server: a host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings: the authorities to trust (without ``ca_certs`` the system's), and our own certificate."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    check_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        """Read the files. Raises InvalidOption, naming the option whose file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_certs)
        except OSError as error:
            raise InvalidOption(f"ssl_ca_certs: cannot use {shown(self.ca_certs)}: {error}") from error
        context.check_hostname = self.check_hostname
        if self.certfile:
            try:
                context.load_cert_chain(self.certfile, self.keyfile)
            except OSError as error:
                files = f"{shown(self.certfile)}, {shown(self.keyfile)}"
                raise InvalidOption(f"ssl_certfile, ssl_keyfile: cannot use {files}: {error}") from error
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL. Safe to print: ``repr`` and ``str`` leave passwords out."""

    topology: Topology
    addresses: tuple[Address, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: Tls | None = None
    service: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    namespace: str | None = None
    connect_timeout: float = 5.0
    replicas: int = 0

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Return the endpoint of ``url``. Raises InvalidOption, which says what is wrong but does not quote the URL."""
        scheme, separator, rest = url.strip().partition("://")
        match = _SCHEME.match(scheme.lower())
        if not separator or match is None:
            raise InvalidOption(
                "the store's URL does not start with a known scheme. Known: valkey://, valkeys:// (TLS), "
                "valkey+unix://, valkey+cluster://, valkeys+cluster://, valkey+sentinel://, "
                "valkeys+sentinel://, and the same with redis and rediss"
            )
        secure, kind = match["base"] in ("valkeys", "rediss"), match["kind"] or "standalone"
        before, _, query = rest.partition("?")
        authority, _, path = before.partition("/")
        login, _, hosts = authority.rpartition("@")
        username, _, password = login.partition(":")
        addresses: tuple[Address, ...]
        if kind == "unix":
            if hosts or secure or not path:
                raise InvalidOption(
                    "write the URL of a unix socket as valkey+unix:///path/to.sock, without host or TLS"
                )
            addresses, names = (Address(path=unquote("/" + path)),), [""]
        else:
            addresses, names = _addresses(hosts, kind), [unquote(part) for part in path.split("/")]
        options = _options(query, secure=secure, sentinel=kind == "sentinel")
        service = names.pop(0) if kind == "sentinel" else ""
        if kind == "sentinel" and not service:
            raise InvalidOption("the URL has no service name. Write valkey+sentinel://host1,host2/service/db")
        topology: Topology = "sentinel" if service else "cluster" if kind == "cluster" else "standalone"
        return cls(
            topology=topology,
            addresses=addresses,
            username=unquote(username) or None,
            password=unquote(password) or None,
            db=_db([name for name in names if name], options.pop("db", None)),
            tls=_tls(options) if secure else None,
            service=service,
            sentinel_username=options.get("sentinel_username"),
            sentinel_password=options.get("sentinel_password"),
            namespace=options.get("namespace"),
            connect_timeout=_seconds(options.get("connect_timeout", "5")),
            replicas=_replicas(options.get("replicas", "0")),
        )

    def __str__(self) -> str:
        hosts = ", ".join(map(str, self.addresses))
        return f"sentinels {hosts} (service {shown(self.service)})" if self.service else hosts

    def for_sentinels(self) -> Endpoint:
        """Return this endpoint with the login for the sentinels themselves."""
        return replace(self, username=self.sentinel_username, password=self.sentinel_password, db=0)


def _addresses(hosts: str, kind: str) -> tuple[Address, ...]:
    default = 26379 if kind == "sentinel" else 6379
    addresses = tuple(_address(part, default) for part in hosts.split(","))
    if kind == "standalone" and len(addresses) > 1:
        raise InvalidOption(
            "this URL takes one host; for several, use valkey+cluster:// or valkey+sentinel://"
        )
    return addresses


def _address(text: str, default_port: int) -> Address:
    match = _HOST.match(text)
    if match is None or int(match["port"] or default_port) not in range(1, 65536):
        raise InvalidOption(f"each host in the store's URL must be host or host:port. {_ENCODE}")
    return Address(match["v6"] or match["name"] or "localhost", int(match["port"] or default_port))


def _options(query: str, *, secure: bool, sentinel: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise InvalidOption(_unknown(name))
        if name in options:
            raise InvalidOption(f"the option {shown(name)} occurs twice in the store's URL")
        if name.startswith("ssl_") and not secure:
            raise InvalidOption(f"the option {shown(name)} needs TLS: use valkeys:// or rediss://")
        if name.startswith("sentinel_") and not sentinel:
            raise InvalidOption(f"the option {shown(name)} needs valkey+sentinel://")
        if not value:
            raise InvalidOption(f"the option {shown(name)} in the store's URL is empty")
        options[name] = value
    return options


def _unknown(name: str) -> str:
    known = f"Known: {', '.join(OPTIONS)}"
    if not re.fullmatch(r"[A-Za-z_]{1,40}", name):
        return f"the store's URL has an option with an invalid name. {_ENCODE} {known}"
    near = difflib.get_close_matches(name.lower(), OPTIONS, n=1)
    hint = f"did you mean {shown(near[0])}? " if near else ""
    return f"unknown option {shown(name)} in the store's URL; {hint}{known}"


def _db(path: list[str], option: str | None) -> int:
    values = [*path, option] if option is not None else path
    if len(values) > 1 or not all(re.fullmatch(r"[0-9]{1,6}", text or "") for text in values):
        raise InvalidOption(
            f"the database must be one number, as the URL's path or as the option 'db'. {_ENCODE}"
        )
    return int(values[0] or 0) if values else 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidOption(
            "the option 'connect_timeout' must be a number of seconds above 0, such as 5 or 0.5"
        )
    return seconds


def _replicas(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text):
        raise InvalidOption("the option 'replicas' must be the number of replicas to wait for, such as 1")
    return int(text)


def _tls(options: dict[str, str]) -> Tls:
    check = options.get("ssl_check_hostname", "true").lower()
    if check not in ("true", "false", "1", "0", "yes", "no"):
        raise InvalidOption("the option 'ssl_check_hostname' must be true or false")
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise InvalidOption("the option 'ssl_keyfile' also needs 'ssl_certfile'")
    return Tls(
        ca_certs=options.get("ssl_ca_certs"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        check_hostname=check in ("true", "1", "yes"),
    )
