"""What /v1/cluster says of each pair of workers: how it moves KV, and why not otherwise."""

from __future__ import annotations

from services.router.cluster import pairs_of
from services.router.member import WorkerState
from services.router.view import View
from tests.unit.test_view import Clock, join


def make_view() -> View:
    return View("model-a", "tokenizer-a", 5.0, Clock())


def test_each_pair_has_its_transport_and_each_reason_once() -> None:
    view, note = make_view(), "tcp instead of rdma (--allow-fallback): no RDMA device"
    join(view, "p0", transport_note=note)
    join(view, "d0", "decode", transport_note=note)
    join(view, "d1", "decode")
    join(view, "m0", "mixed", transport="mooncake")
    assert pairs_of(view.entries()) == [
        {"prefill": "p0", "decode": "d0", "transport": "tcp", "note": note},
        {"prefill": "p0", "decode": "d1", "transport": "tcp", "note": note},
    ]


def test_a_pair_uses_the_first_of_the_writers_transports_that_the_reader_has() -> None:
    view = make_view()
    join(view, "p0", transport="mooncake", spare_transports=["tcp"])
    join(view, "d0", "decode", transport="tcp")
    join(view, "d1", "decode", transport="mooncake", spare_transports=["tcp"])
    join(view, "d2", "decode", transport="mooncake")  # has what p0 has, but nothing that all of them have
    pairs = {pair["decode"]: pair for pair in pairs_of(view.entries())}
    assert (pairs["d0"]["transport"], pairs["d1"]["transport"]) == ("tcp", "mooncake")
    assert pairs["d2"] == {
        "prefill": "p0",
        "decode": "d2",
        "transport": "",
        "note": "transport differs: tcp on p0, mooncake on d2",
    }


def test_a_pair_that_cannot_exchange_kv_says_why_and_a_lost_worker_makes_none() -> None:
    view = make_view()
    join(view, "p0", transport="rdma")
    join(view, "d0", "decode", transport="tcp")
    join(view, "d1", "decode", transport="rdma")
    view.link_is("d1", WorkerState.LOST, "gone")
    (pair,) = pairs_of(view.entries())
    assert pair["transport"] == ""
    assert "rdma on p0" in pair["note"]
    assert "tcp on d0" in pair["note"]
