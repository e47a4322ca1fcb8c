"""configure and settings."""

from __future__ import annotations

import json

from penstock.core.lifecycle import EventType
from penstock.storage.values import QueueSettings
from tests.contract.factories import Bench


async def test_a_queue_has_the_defaults_until_it_is_configured(bench: Bench) -> None:
    assert await bench.storage.settings(bench.queue) == QueueSettings()


async def test_settings_come_back_as_they_were_given_and_are_in_the_log(bench: Bench) -> None:
    settings = QueueSettings(
        keep_completed=5, keep_failed=0, events_count=None, events_age_ms=1000, events_hard_cap=50
    )

    await bench.storage.configure(bench.queue, settings)

    assert await bench.storage.settings(bench.queue) == settings
    [event] = await bench.events()
    assert (event.type, event.id) == (EventType.CONFIGURED, "")
    data = json.loads(event.data)
    assert (data["keep_completed"], data["keep_failed"], data["events_age_ms"]) == (5, 0, 1000)


async def test_settings_of_one_queue_are_not_those_of_another(bench: Bench) -> None:
    await bench.storage.configure(bench.queue, QueueSettings(keep_failed=1))

    assert await bench.storage.settings(f"{bench.queue}-2") == QueueSettings()
