"""The ACL rule that docs/bridges.md gives is enough for all operations, and for no other queue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock import StorageRefused
from penstock.bridges.redis_work_queue import Cleaned, Item, WorkQueue
from tests.bridges.polling import clean_until_something
from tests.servers import HOST, ValkeyServer

PAGE = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()
[RULE] = re.findall(r"^ACL SETUSER (.*)$", PAGE, re.MULTILINE)


async def test_the_rule_is_enough_for_all_operations_on_one_queue() -> None:
    with ValkeyServer(password="root", users=(RULE,)) as server:
        url = f"valkey://worker:secret@{HOST}:{server.port}"
        queue, other = WorkQueue(url, "thumbnails"), WorkQueue(url, "other")
        await queue.add_items([Item("1", "a"), Item("2", "b")])
        await queue.add_unique_item(Item("3", "c"))
        assert await queue.lease("1ms", wait=0) is not None
        assert (await clean_until_something(queue)).returned == 1
        for _ in range(3):
            item = await queue.lease("30s", wait=0)
            assert item is not None
            assert await queue.complete(item)
        assert await queue.lease("30s", wait="10ms") is None
        with server.client() as admin:
            admin.set("thumbnails:item:stray", "data")
            admin.lpush("thumbnails:queue", "ghost", "ghost")
        assert await queue.deep_clean(grace=0) == Cleaned(returned=1, dropped=2)
        assert await queue.lengths() == (1, 0)

        with pytest.raises(StorageRefused):
            await other.add_item(Item("data"))
        await queue.close()
        await other.close()
