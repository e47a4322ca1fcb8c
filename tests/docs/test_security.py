"""What docs/security.md says of TLS and of users with few rights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from penstock import App, StorageRefused
from penstock.storage.valkey.library import library
from tests.docs.test_acl import LOGIN, PROD_KEYS, RULE
from tests.servers import HOST, ValkeyServer
from tests.tls_front import TlsFront

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    with ValkeyServer(password="root", users=getattr(request, "param", ())) as server:
        yield server


async def enqueue(url: str, *, namespace: str = "default") -> str | None:
    async with App(url, namespace=namespace) as app:
        return (await app.queue("mail").enqueue(1)).status


async def test_a_certificate_for_another_host_is_refused(server: ValkeyServer) -> None:
    with TlsFront(server, names=["store.example"]) as front:
        url = f"{front.url}?ssl_ca_certs={front.ca_file}"
        with pytest.raises(StorageRefused, match="ssl_check_hostname"):
            await enqueue(url)
        assert "ssl_check_hostname=false" in PAGE
        assert await enqueue(f"{url}&ssl_check_hostname=false") == "queued"


async def test_a_certificate_of_an_unknown_authority_is_refused_whatever_its_host(
    server: ValkeyServer,
) -> None:
    with TlsFront(server) as front:
        for option in ("", "?ssl_check_hostname=false"):
            with pytest.raises(StorageRefused, match="cannot trust"):
                await enqueue(f"{front.url}{option}")


@pytest.mark.parametrize("server", [(RULE.replace("~penstock:*", PROD_KEYS),)], indirect=True)
def test_a_user_who_may_load_functions_can_replace_those_of_other_namespaces(server: ValkeyServer) -> None:
    """That is why the page says so."""
    name, _, password = LOGIN.partition(":")
    with Redis(port=server.port, username=name, password=password) as user:
        enqueue_name = library().function("enqueue")
        code = f"#!lua name={library().name}\nredis.register_function('{enqueue_name}', function() end)"
        user.execute_command("FUNCTION", "LOAD", "REPLACE", code)
    assert "replace the functions" in PAGE


@pytest.mark.parametrize("server", [(RULE.replace("+function|load", ""),)], indirect=True)
async def test_a_user_without_the_right_to_load_functions_needs_another_to_load_them(
    server: ValkeyServer,
) -> None:
    url = f"valkey://{LOGIN}@{HOST}:{server.port}"
    with pytest.raises(StorageRefused):
        await enqueue(url)
    await enqueue(f"valkey://:root@{HOST}:{server.port}", namespace="admin")
    assert await enqueue(url) == "queued"
