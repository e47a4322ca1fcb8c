"""Steps in `penstock show`."""

from __future__ import annotations

from pathlib import Path

from penstock import App, JobContext
from tests.cli.conftest import Shell


async def test_show_lists_the_steps_of_a_job(tmp_path: Path, penstock: Shell) -> None:
    url = f"sqlite:///{tmp_path}/steps.db"
    async with App(url) as app:

        def pay() -> str:
            raise ConnectionError("declined")

        @app.task(queue="shop")
        async def sell(context: JobContext) -> None:
            for n in range(21):
                await context.step("load", lambda: 1, key=n)
            await context.step("charge", pay, attempts=2, backoff="1ms")

        await sell.options(id="order-7").enqueue()
        await app.worker(burst=True).run()

    text = penstock.ok("show", "order-7", "--url", url)
    assert "steps        ... and 2 earlier steps\n             load[2] completed\n" in text
    assert "charge failed after 2 failed attempts (ConnectionError: declined)\n" in text
    assert "step load[20] completed" in text
    told = penstock.json("show", "order-7", "--url", url)
    assert len(told["steps"]) == 22
    charge = told["steps"][-1]
    assert (charge["name"], charge["status"], charge["failures"]) == ("charge", "failed", 2)
    assert (charge["error_type"], charge["error"]) == ("ConnectionError", "declined")
    assert penstock.json("show", "order-7", "--url", url)["timeline"][-2]["type"] == "recorded"
