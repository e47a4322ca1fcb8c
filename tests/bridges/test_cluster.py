"""In a cluster the layout works with a hash tag in the prefix, for the published clients as for ours."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from penstock import InvalidOption, uuid7
from penstock.bridges.redis_work_queue import Cleaned, Item, WorkQueue
from tests.bridges.peers import Peer
from tests.bridges.polling import clean_until_something

pytestmark = pytest.mark.cluster


def test_a_prefix_without_a_hash_tag_is_refused_in_a_cluster() -> None:
    for prefix in ("jobs", "jobs{}", "{jobs", "}jobs{"):
        with pytest.raises(InvalidOption, match="hash tag"):
            WorkQueue("valkey+cluster://localhost", prefix)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("given", ["url", "client"])
async def test_a_tagged_queue_is_shared_in_a_cluster(cluster_url: str, given: str) -> None:
    prefix, server = f"work:{{{uuid7()}}}", urlsplit(cluster_url)
    async with redis.asyncio.RedisCluster(host=str(server.hostname), port=server.port or 0) as client:
        ours = WorkQueue(cluster_url if given == "url" else client, prefix)
        with Peer("node", cluster_url, prefix) as theirs:
            theirs.ask("add", "a", "theirs")
            assert await ours.add_items([Item("ours", "a"), Item("ours", "b")]) == [False, True]

            item = await ours.lease("30s", wait=0)

            assert item == Item("theirs", "a")
            assert theirs.ask("lease", 30) == ["b", "ours"]
            assert await ours.complete(item) is True
            assert theirs.ask("complete", "b") is True
            assert theirs.ask("lengths") == [0, 0]

        await client.set(f"{prefix}:item:stray", "data")
        assert await ours.deep_clean(grace=0) == Cleaned(returned=1)
        assert await ours.lease("1ms", wait="10s") == Item("data", "stray")
        assert (await clean_until_something(ours)).returned == 1
        assert await ours.lengths() == (1, 0)
        await ours.close()


async def test_a_waiting_lease_gets_what_is_added_in_a_cluster(cluster_url: str) -> None:
    ours = WorkQueue(cluster_url, f"{{{uuid7()}}}")
    waiting = asyncio.create_task(ours.lease("30s", wait="30s"))
    await asyncio.sleep(0)

    await ours.add_item(Item("data", "a"))

    assert await waiting == Item("data", "a")
    await ours.close()
