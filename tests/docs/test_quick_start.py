"""The quick start of README.md and docs/guide.md, as a reader follows it: write its files, run its commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT, Example, examples

PENSTOCK = Path(sys.executable).with_name("penstock")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_quick_start_prints_the_same_on_every_run(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    titles = re.findall(r'^```python title="(\w+\.py)"$', text, re.MULTILINE)
    files = {title: next(examples(ROOT / page, f'python title="{title}"')) for title in titles}
    for title, example in files.items():
        (tmp_path / title).write_text(example.code)
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    [start] = re.findall(r"^penstock (worker \w+:\w+)$", shell, re.MULTILINE)
    scripts = re.findall(r"^python (\w+\.py)$", shell, re.MULTILINE)
    assert {start.split()[1].partition(":")[0] + ".py", *scripts} == set(files)

    command = [str(PENSTOCK)] if PENSTOCK.exists() else [sys.executable, "-m", "penstock"]
    with subprocess.Popen(
        [*command, *start.split()], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as worker:
        try:
            printed = [[ran(script, tmp_path) for script in scripts] for _ in range(2)]
        finally:
            worker.send_signal(signal.SIGINT)
            _, log = worker.communicate(timeout=60)
    assert worker.returncode == 0, log
    assert printed[0] == printed[1] == [promised(files[script]) for script in scripts]
    assert log.splitlines()[0].endswith("namespace default, queues mail")


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
