"""The quick start of README.md and docs/guide.md, and docs/web.md, as a reader follows them: write the files, run the
commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT, Example, examples

PENSTOCK = Path(sys.executable).with_name("penstock")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_quick_start_prints_the_same_on_every_run(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    files = written_files(page, tmp_path)
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    [start] = re.findall(r"^penstock (worker \w+:\w+)$", shell, re.MULTILINE)
    scripts = re.findall(r"^python (\w+\.py)$", shell, re.MULTILINE)
    assert {start.split()[1].partition(":")[0] + ".py", *scripts} == set(files)

    log: list[str] = []
    with running_worker(start, tmp_path, log):
        printed = [[ran(script, tmp_path) for script in scripts] for _ in range(2)]
    assert printed[0] == printed[1] == [promised(files[script]) for script in scripts]
    store = re.search(r'App\("sqlite:///(\w+\.db)"\)', text)
    assert store is not None
    first = f"store sqlite:///{tmp_path / store[1]}, namespace default, queues mail"
    assert log[0].endswith(first)


VISITOR = """
import asyncio
import httpx
from web import web

async def state_of(client, ref):
    while (status := (await client.get(f"/jobs/{ref}")).json())["state"] not in ("completed", "failed"):
        await asyncio.sleep(0.05)
    return status

async def main():
    transport = httpx.ASGITransport(web)
    async with web.router.lifespan_context(web), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post("/mails", params={"to": "ada@example.org"})
        print(answer.status_code, await asyncio.wait_for(state_of(client, answer.json()["job"]), 60))
        for ref in ("mail/nobody", "nobody", "mail/a/b"):
            print((await client.get(f"/jobs/{ref}")).status_code)

asyncio.run(main())
"""


@pytest.mark.timeout(240)
def test_the_fastapi_application_enqueues_and_tells_the_state_of_jobs(tmp_path: Path) -> None:
    files = written_files("docs/web.md", tmp_path)
    assert set(files) == {"jobs.py", "web.py", "test_web.py"}
    assert files["web.py"].code.count("\n") < 40
    (tmp_path / "visitor.py").write_text(VISITOR)

    with running_worker("worker jobs:app", tmp_path, []):
        said = ran("visitor.py", tmp_path)

    shown = "{'state': 'completed', 'result': 'hello for ada@example.org', 'error': None}"
    assert said == [f"202 {shown}", "404", "404", "404"]


def test_the_pages_have_the_same_tasks_so_that_both_work_in_one_folder() -> None:
    pages = [next(examples(ROOT / page, 'python title="jobs.py"')) for page in ("README.md", "docs/web.md")]
    assert pages[0].code == pages[1].code


@pytest.mark.timeout(120)
def test_the_test_of_the_fastapi_application_passes(tmp_path: Path) -> None:
    written_files("docs/web.md", tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_web.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def written_files(page: str, folder: Path) -> dict[str, Example]:
    """Write the titled examples of a page into ``folder``, and return them by title."""
    titles = re.findall(r'^```python title="(\w+\.py)"$', (ROOT / page).read_text(), re.MULTILINE)
    files = {title: next(examples(ROOT / page, f'python title="{title}"')) for title in titles}
    for title, example in files.items():
        (folder / title).write_text(example.code)
    return files


@contextmanager
def running_worker(arguments: str, folder: Path, log: list[str]) -> Iterator[None]:
    """Run a worker by command, stop it as Ctrl-C does, and put the lines that it logged into ``log``."""
    command = [str(PENSTOCK)] if PENSTOCK.exists() else [sys.executable, "-m", "penstock"]
    with subprocess.Popen(
        [*command, *arguments.split()], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as worker:
        try:
            yield
        finally:
            worker.send_signal(signal.SIGINT)
            _, told = worker.communicate(timeout=60)
    log += told.splitlines()
    assert worker.returncode == 0, told


def ran(script: str, folder: Path) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def promised(script: Example) -> list[str]:
    assert script.promised
    return script.promised


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
