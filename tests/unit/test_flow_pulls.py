"""What the router tells a prefill worker about who holds more of a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.blocks import block_names
from services.config import RouterConfig
from services.router.compat import kind_of
from services.router.core import RouterCore
from services.router.plan import name_prompt, names_after
from tests.fake_worker import Cluster, fingerprint
from tests.unit.test_flow import PROMPT, collect, ids, make_core, request, until

NEXT = tuple(range(500, 520))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.add("p0", "prefill")
    await cluster.add("d0", "decode")
    yield cluster
    await cluster.stop()


async def started(cluster: Cluster, **changes: object) -> RouterCore:
    core = make_core(cluster, **changes)
    await core.start()
    await until(lambda: core.ready()[0])
    return core


async def test_the_next_turn_names_the_decode_worker_of_the_last_one_as_its_source(cluster: Cluster) -> None:
    core = await started(cluster)
    answer = ids(await collect(core, request(60)))
    await collect(core, request(4, (*PROMPT, *answer, *NEXT)))
    first, second = (x for x in cluster.workers["p0"].submits)
    assert not first.HasField("source")
    source, d0 = second.source, cluster.workers["d0"]
    assert (source.worker_id, source.epoch, source.address) == ("d0", "e1", d0.address)
    assert source.blocks == (len(PROMPT) + 60 - 1) // 16  # of the last token no KV was made
    await core.stop()


async def test_without_pulls_no_source_is_named(cluster: Cluster) -> None:
    core = await started(cluster, router=RouterConfig(pull="off"))
    answer = ids(await collect(core, request(60)))
    await collect(core, request(4, (*PROMPT, *answer, *NEXT)))
    assert not any(x.HasField("source") for x in cluster.workers["p0"].submits)
    await core.stop()


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 24, 25, 60])
def test_names_after_an_answer_are_those_of_a_prompt_with_it_but_for_the_last_token(num_tokens: int) -> None:
    kind = kind_of(fingerprint())
    named = name_prompt(request(num_tokens), kind)
    answer = tuple(range(700, 700 + num_tokens))
    assert names_after(named, answer) == block_names((*PROMPT, *answer)[:-1], 16, named.root)
