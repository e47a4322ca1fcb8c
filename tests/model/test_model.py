"""Random sequences of verbs, with repeated calls and lost replies, on every engine against the model."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.storage import open_storage
from tests.model.machine import Machine

# Examples by engine: a step is about fifteen round trips.
EXAMPLES = {"memory": 30, "sqlite": 20}
LONG_EXAMPLES = {"memory": 50, "sqlite": 40}


def walk(url: str, *, examples: int, steps: int, derandomize: bool) -> None:
    with asyncio.Runner() as runner:
        storage = open_storage(url)
        runner.run(storage.open())
        machine = type("Machine", (Machine,), {"storage": storage, "runner": runner})
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    derandomize=derandomize,
                    print_blob=False,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(storage.close())


@pytest.mark.timeout(600)  # a failure is shrunk before it is shown
def test_every_engine_does_what_the_model_does(engine: str, store_url: str) -> None:
    walk(store_url, examples=EXAMPLES.get(engine, 15), steps=30, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_engine_does_what_the_model_does_on_long_walks(engine: str, store_url: str) -> None:
    """Always the same walks, so that a red run says something of the change; new ones with PENSTOCK_NEW_WALKS=1."""
    walk(
        store_url,
        examples=LONG_EXAMPLES.get(engine, 30),
        steps=60,
        derandomize=not os.environ.get("PENSTOCK_NEW_WALKS"),
    )
