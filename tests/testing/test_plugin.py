"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APP = """
from penstock import App

app = App("sqlite:////nowhere/at/all/penstock.db")
told = []

@app.on_start
async def start():
    told.append("start")

@app.on_stop
async def stop():
    told.append("stop")

@app.task(attempts=2, backoff="1h")
async def double(n: int) -> int:
    return 2 * n
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(tasks=APP)
    pytester.makeini(
        "[pytest]\nfilterwarnings = error\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    return pytester


def run(inner: pytest.Pytester, tests: str, *args: str) -> pytest.RunResult:
    inner.makepyfile(test_it=tests)
    is_installed = entry_points(group="pytest11", name="penstock")
    plugin = [] if is_installed else ["-p", "pytest_penstock"]  # run from the source tree
    return inner.runpytest_subprocess(*plugin, "-p", "no:valkey", *args)


def test_the_fixture_serves_sync_and_async_tests_and_gives_the_app_back(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
        from tasks import app, double, told

        def test_sync(penstock_harness):
            h = penstock_harness(app)
            job = double.sync.enqueue(2)
            h.sync.drain()
            assert job.result(timeout="5s") == 4

        def test_the_hooks_have_run():
            assert told == ["start", "stop"]

        async def test_async(penstock_harness):
            h = penstock_harness(app, mode="inline", hooks=False)
            assert await double.options(wait="5s").call(3) == 6
            await h.assert_enqueued(double, 3, count=1)

        async def test_async_with_hooks(penstock_harness):
            h = penstock_harness(app)
            assert await h.perform(double, 4) == 8

        def test_each_test_has_a_store_of_its_own(penstock_harness):
            h = penstock_harness(app)
            assert h.sync.enqueued() == []
            assert told == ["start", "stop"] * 2

        async def test_two_apps_run_side_by_side(penstock_harness):
            from penstock import App
            other = App("memory://")
            other.task(name="same")(lambda n: n)
            one, two = penstock_harness(app), penstock_harness(other)
            await double.enqueue(1)
            assert len(await one.enqueued()) == 1
            assert await two.enqueued() == []

        def test_unused(penstock_harness):
            pass
        """,
    )
    result.assert_outcomes(passed=7)


def test_an_assertion_of_the_harness_fails_the_test_with_its_message(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
        from tasks import app, double

        def test_it(penstock_harness):
            penstock_harness(app).sync.assert_enqueued(double, 1)
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a job of double(1) should have been enqueued*"])


def test_the_fixture_is_listed_with_what_it_does(inner: pytest.Pytester) -> None:
    result = run(inner, "", "--fixtures")
    result.stdout.fnmatch_lines(["penstock_harness*", "*Return a factory of harnesses*"])


def test_the_plugin_imports_nothing_of_penstock_until_it_is_used() -> None:
    script = (
        "import sys, pytest, pytest_penstock; print(*(n for n in sys.modules if n.startswith('penstock')))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_pytest_finds_the_plugin_by_its_entry_point_and_the_wheel_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"penstock": "pytest_penstock"}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {
        "only-include": ["src/penstock", "src/pyspark_penstock.py", "src/pytest_penstock.py"],
        "sources": ["src"],
    }
