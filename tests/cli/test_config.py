from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell


def test_every_key_has_a_value_an_origin_and_a_type(penstock: Shell) -> None:
    rows = {row["key"]: row for row in penstock.json("config", "list")}

    assert rows["url"]["value"] == "sqlite:///penstock.db"
    assert rows["url"]["origin"] == "default"
    assert rows["attempts"] | {"value": 0} == rows["attempts"] | {"value": 0, "type": "number", "default": 3}
    assert "attempts" in penstock.ok("config", "list")


def test_a_flag_goes_before_the_environment_before_what_is_saved_before_the_files(
    penstock: Shell, tmp_path: Path
) -> None:
    def origin(*flags: str, **env: str) -> tuple[str, str]:
        row = penstock.json("config", "get", "url", *flags, env=env)
        return row["value"], row["origin"].split()[0]

    assert origin() == ("sqlite:///penstock.db", "default")
    (tmp_path / "pyproject.toml").write_text('[tool.penstock]\nurl = "sqlite:///pyproject.db"\n')
    assert origin() == ("sqlite:///pyproject.db", "project")
    (tmp_path / "penstock.toml").write_text('url = "sqlite:///toml.db"\n')
    assert origin() == ("sqlite:///toml.db", "project")
    (tmp_path / ".env").write_text("# of ours\nexport PENSTOCK_URL='sqlite:///env.db'\nOTHER=1\n")
    assert origin() == ("sqlite:///env.db", ".env")
    penstock.ok("config", "set", "url", "sqlite:///saved.db")
    assert origin() == ("sqlite:///saved.db", "saved")
    assert origin(PENSTOCK_URL="sqlite:///variable.db") == ("sqlite:///variable.db", "environment")
    assert origin("--url", "sqlite:///flag.db", PENSTOCK_URL="sqlite:///variable.db") == (
        "sqlite:///flag.db",
        "flag",
    )
    assert penstock.ok("--url", "sqlite:///first.db", "config", "get", "url") == "sqlite:///first.db\n"


def test_the_project_is_found_from_a_folder_below_it(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("config", "set", "attempts", "7")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)

    assert Shell(below).ok("config", "get", "attempts") == "7\n"
    assert str(tmp_path / ".penstock" / "config.toml") in Shell(below).ok("config", "path")


def test_an_empty_value_takes_back_what_was_saved(penstock: Shell) -> None:
    penstock.ok("config", "set", "timeout", "90s")
    assert penstock.ok("config", "get", "timeout") == "1m30s\n"
    penstock.ok("config", "set", "timeout", "")
    assert "timeout is not set" in penstock.refused("config", "get", "timeout", code=3)


def test_saving_a_value_that_the_environment_overrides_is_reported(penstock: Shell) -> None:
    run = penstock("config", "set", "queue", "mail", env={"PENSTOCK_QUEUE": "other"})

    assert run.returncode == 0
    assert "environment says 'other'" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("config", "get", "qeue"), "Did you mean 'queue'?"),
        (("config", "set", "attempt", "3"), "Did you mean 'attempts'?"),
        (("config", "set", "attempts", "often"), "Give a whole number"),
        (("config", "set", "attempts", "0"), "at least 1"),
        (("config", "set", "timeout", "soon"), "Give seconds, or a duration"),
        (("config", "set", "commands", "perhaps"), "Give true or false"),
        (("config", "set", "url", "foo://bar"), "No engine serves foo://"),
        (("config", "set", "queue", "bad queue"), "Give a queue name such as mail or default"),
    ],
)
def test_keys_and_values_that_cannot_be_are_refused(
    penstock: Shell, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in penstock.refused(*arguments, code=2)
    assert not (tmp_path / ".penstock").exists()


def test_a_file_with_an_unknown_key_or_no_toml_is_refused(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("concurency = 3\n")
    assert "Did you mean 'concurrency'?" in penstock.refused("config", "list", code=2)
    (tmp_path / "penstock.toml").write_text("concurrency = \n")
    assert "penstock.toml is not valid TOML" in penstock.refused("config", "list", code=2)
    (tmp_path / "penstock.toml").write_text("concurrency = true\n")
    assert "Give a whole number" in penstock.refused("config", "list", code=2)


@pytest.mark.parametrize("line", ['url = "foo://bar"', 'queue = "bad queue"'])
def test_an_error_of_a_saved_value_names_the_file(penstock: Shell, tmp_path: Path, line: str) -> None:
    penstock.ok("config", "set", "attempts", "5")
    (tmp_path / ".penstock" / "config.toml").write_text(f"{line}\n")
    assert ".penstock/config.toml: " in penstock.refused("enqueue", "true", code=2)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("valkey://ada:secret@host:1234", "valkey://ada:***@host:1234"),
        ("valkey+cluster://:secret@a:1,b:2", "valkey+cluster://:***@a:1,b:2"),
        # Neither can be used as it is; whoever looks why must not print it.
        ("valkey://ada:sec/secret@host", "valkey://ada:***@host"),
        ("valkey://ada:[secret@host", "valkey://ada:***@host"),
        (
            "valkey+sentinel://ada:secret@a,b/main?sentinel_password=s@secret&namespace=n",
            "valkey+sentinel://ada:***@a,b/main?sentinel_password=***&namespace=n",
        ),
        (
            "valkey+sentinel://a:1/main?namespace=n&sentinel_password=s@secret",
            "valkey+sentinel://a:1/main?namespace=n&sentinel_password=***",
        ),
        ("valkey://host:1234/0?namespace=n", "valkey://host:1234/0?namespace=n"),
    ],
)
def test_a_password_is_not_listed(penstock: Shell, url: str, shown: str) -> None:
    [row] = [row for row in penstock.json("config", "list", env={"PENSTOCK_URL": url}) if row["key"] == "url"]
    assert row["value"] == shown
    assert "secret" not in penstock.ok("config", "list", env={"PENSTOCK_URL": url})
    run = penstock("config", "set", "url", "sqlite:///saved.db", env={"PENSTOCK_URL": url})
    assert f"environment says {shown!r}" in run.stderr


def test_saved_settings_are_never_readable_by_others(penstock: Shell, tmp_path: Path) -> None:
    process = penstock.start("config", "set", "url", "valkey://me:secret@host", umask=0)
    process.communicate(timeout=60)

    (saved,) = [file for file in (tmp_path / ".penstock").iterdir() if "secret" in file.read_text()]
    assert saved.stat().st_mode & 0o777 == 0o600


def test_retries_of_other_tools_are_attempts(penstock: Shell) -> None:
    for name in ("max_retries", "max-retries", "retries"):
        said = penstock("config", "set", name, "4")
        assert (said.returncode, said.stderr) == (
            0,
            f"attempts is now 5: the first run, and {name} = 4 after it\n",
        )
        assert penstock.ok("config", "get", "attempts") == "5\n"
    assert "attempts cannot be 'many'" in penstock.refused("config", "set", "max_retries", "many", code=2)
