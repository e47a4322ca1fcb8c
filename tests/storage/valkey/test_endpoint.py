"""What a URL of a Valkey or Redis store means, and how a wrong one is refused."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidOption
from penstock.storage.valkey.endpoint import Address, Endpoint, Tls

SECRET = "p4ss/w@rd?#:é"
ENCODED = "p4ss%2Fw%40rd%3F%23%3A%C3%A9"


@pytest.mark.parametrize(
    ("url", "topology", "addresses", "tls"),
    [
        ("valkey://", "standalone", ["localhost:6379"], False),
        ("valkey://h", "standalone", ["h:6379"], False),
        ("redis://h:1/", "standalone", ["h:1"], False),
        ("rediss://h", "standalone", ["h:6379"], True),
        ("VALKEYS://[::1]:7000", "standalone", ["[::1]:7000"], True),
        ("valkey+unix:///run/a%20b.sock?db=0", "standalone", ["unix:/run/a b.sock"], False),
        ("valkey+cluster://a,b:7001", "cluster", ["a:6379", "b:7001"], False),
        ("rediss+cluster://a", "cluster", ["a:6379"], True),
        ("redis+sentinel://a,b:2/main/3", "sentinel", ["a:26379", "b:2"], False),
        ("valkeys+sentinel://a/main", "sentinel", ["a:26379"], True),
    ],
)
def test_each_scheme_names_its_topology_addresses_and_tls(url, topology, addresses, tls):
    endpoint = Endpoint.parse(url)
    assert endpoint.topology == topology
    assert [str(address) for address in endpoint.addresses] == addresses
    assert (endpoint.tls is not None) is tls


def test_login_database_and_options_are_read_and_percent_decoded():
    endpoint = Endpoint.parse(f"valkey://ad%40a:{ENCODED}@h:7/5?namespace=shop&connect_timeout=0.5s")
    assert (endpoint.username, endpoint.password, endpoint.db) == ("ad@a", SECRET, 5)
    assert (endpoint.namespace, endpoint.connect_timeout) == ("shop", 0.5)
    assert endpoint.addresses == (Address("h", 7),)


@pytest.mark.parametrize(
    "url", ["valkey://h/5", "valkey://h?db=5", "valkey+unix:///s?db=5", "valkey+sentinel://h/m/5"]
)
def test_the_database_is_read_from_path_or_option(url):
    assert Endpoint.parse(url).db == 5


def test_sentinels_have_a_login_of_their_own():
    url = "valkey+sentinel://:data@h/main/2?sentinel_username=watch&sentinel_password=dog"
    endpoint = Endpoint.parse(url)
    sentinels = endpoint.for_sentinels()
    assert (endpoint.service, endpoint.password, endpoint.db) == ("main", "data", 2)
    assert (sentinels.username, sentinels.password, sentinels.db) == ("watch", "dog", 0)
    assert Endpoint.parse("valkey+sentinel://:data@h/main").for_sentinels().password is None


def test_tls_options_are_read():
    query = "ssl_ca_certs=/ca&ssl_certfile=/c&ssl_keyfile=/k&ssl_check_hostname=false"
    assert Endpoint.parse(f"valkeys://h?{query}").tls == Tls("/ca", "/c", "/k", check_hostname=False)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
def test_a_tls_file_that_is_missing_is_named(option):
    tls = Endpoint.parse(f"valkeys://h?{option}=/nowhere/x.pem").tls
    assert tls is not None
    with pytest.raises(InvalidOption, match=rf"{option}.*/nowhere/x\.pem"):
        tls.context()


def test_an_unknown_option_is_named_with_the_known_ones_and_the_nearest():
    with pytest.raises(InvalidOption, match=r"'name_space'.*did you mean 'namespace'\? Known: .*ssl_keyfile"):
        Endpoint.parse("valkey://h?name_space=x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "known scheme"),
        ("h:6379", "known scheme"),
        ("valkeys+unix:///s", "unix socket"),
        ("valkey+unix://h/s", "unix socket"),
        ("valkey://a,b", r"valkey\+cluster"),
        ("valkey://h:port", "host:port"),
        ("valkey://h:99999", "host:port"),
        ("valkey://h/x", "database"),
        ("valkey://h/1/2", "database"),
        ("valkey://h/1?db=1", "database"),
        ("valkey+sentinel://h", "no service name"),
        ("valkey://h?ssl_ca_certs=x", "valkeys://"),
        ("valkey://h?sentinel_password=x", r"valkey\+sentinel"),
        ("valkey://h?namespace=", "empty"),
        ("valkey://h?namespace=a&namespace=b", "twice"),
        ("valkey://h?connect_timeout=-1", "connect_timeout"),
        ("valkey://h?connect_timeout=nan", "connect_timeout"),
        ("valkeys://h?ssl_check_hostname=perhaps", "ssl_check_hostname"),
        ("valkeys://h?ssl_keyfile=k", "ssl_certfile"),
    ],
)
def test_what_cannot_be_meant_is_refused(url, message):
    with pytest.raises(InvalidOption, match=message):
        Endpoint.parse(url)


def test_passwords_are_in_no_repr():
    endpoint = Endpoint.parse("valkey+sentinel://u:hunter2@h/m?sentinel_password=hunter3")
    assert "hunter" not in repr(endpoint) + str(endpoint) + f"{endpoint}" + repr(endpoint.for_sentinels())


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://u:hunter2@h",
        "valkey://u:hunter2@h?nosuch=1",
        "valkey://u:hunter2@h:x",
        "valkey://u:hunter2/@h",
        "valkey://u:/hunter2@h",
        "valkey://u:?hunter2@h",
        "valkey://:1?hunter2@h",
        "valkey://:1?x&hunter2@h=1",
        "valkey://:1/hunter2@h",
        "valkey://:1#hunter2@h,b",
        "valkey+unix://u:hunter2@h/s",
    ],
)
def test_passwords_appear_in_no_message_even_if_the_url_is_badly_encoded(url):
    with pytest.raises(InvalidOption) as caught:
        Endpoint.parse(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
